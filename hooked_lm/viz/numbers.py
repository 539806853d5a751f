"""Numbers as text: NaN is "no value", negative ones have minus signs, and what rounds to zero has no sign."""

import math
from collections.abc import Iterable
from typing import SupportsFloat

MINUS = "\N{MINUS SIGN}"


def rounded(value: SupportsFloat, digits: int = 2, sign: bool = False) -> str:
    """A number with this many decimals.

    >>> (
    ...     rounded(-0.001),
    ...     rounded(0.126, sign=True),
    ...     rounded(float("nan")),
    ...     rounded(-1.5, 1) == f"{MINUS}1.5",
    ... )
    ('0.00', '+0.13', 'no value', True)
    """
    return _signed(f"{float(value):.{digits}f}", sign)


def short(value: SupportsFloat, sign: bool = False) -> str:
    """A number with three significant digits.

    >>> short(0.12345), short(2.0, sign=True), short(-0.0), short(-2.5) == f"{MINUS}2.5"
    ('0.123', '+2', '0', True)
    """
    return _signed(f"{float(value):.3g}", sign)


def aligned(values: Iterable[SupportsFloat], sign: bool = False) -> list[str]:
    """Numbers with equally many decimals, three significant digits of the largest.

    >>> (
    ...     aligned([12.345, 0.5]),
    ...     aligned([0.15, -0.11314]) == ["0.150", f"{MINUS}0.113"],
    ...     aligned([0.0, float("nan")]),
    ... )
    (['12.3', '0.5'], True, ['0.00', 'no value'])
    """
    numbers = [float(value) for value in values]
    largest = max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)
    decimals = max(0, 2 - math.floor(math.log10(largest))) if largest else 2
    return [_signed(f"{number:.2e}" if decimals > 6 else f"{number:.{decimals}f}", sign) for number in numbers]


def _signed(text: str, sign: bool) -> str:
    """A number, with a plus sign if it is positive and `sign` is set."""
    number = float(text)
    if number != number:
        return "no value"
    if not number:
        return text.removeprefix("-")
    return f"+{text}" if sign and number > 0 else text.replace("-", MINUS)
