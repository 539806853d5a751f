"""Numbers as text."""

from typing import SupportsFloat


def rounded(value: SupportsFloat, digits: int = 2, sign: bool = False) -> str:
    """A number with this many decimals; what rounds to zero has no sign. NaN is "no value".

    >>> rounded(-0.001), rounded(0.126, sign=True), rounded(-1.5, 1, sign=True), rounded(float("nan"))
    ('0.00', '+0.13', '-1.5', 'no value')
    """
    value = float(value)
    if value != value:
        return "no value"
    text = f"{value:.{digits}f}"
    if not float(text):
        return text.removeprefix("-")
    return f"+{text}" if sign and value > 0 else text
