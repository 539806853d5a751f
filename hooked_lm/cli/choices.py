"""Choices of layers, positions and heads, as they are typed."""


def integers(name: str, text: str) -> list[int]:
    """Integers with commas between them; ValueError for anything else.

    >>> integers("layers", "0,-1")
    [0, -1]
    """
    parts = text.split(",")
    if not all(part.strip().removeprefix("-").isdigit() for part in parts):
        raise ValueError(f"{name} must be integers with ',' between them, got {text!r}")
    return [int(part) for part in parts]


def which(name: str, text: str) -> object:
    """ "each", None for all together, indices, or labels of heads.

    >>> which("heads", "L1H7, L2H0"), which("layers", "together"), which("layers", "0")
    (['L1H7', 'L2H0'], None, [0])
    """
    if text in ("each", "together"):
        return None if text == "together" else text
    labels = [part.strip() for part in text.split(",")]
    return labels if name == "heads" and labels[0].startswith("L") else integers(name, text)


def named(name: str, given: list[str] | None) -> dict[str, str]:
    """What was given as name=value, by name.

    >>> named("option", ["components=mlps"])
    {'components': 'mlps'}
    """
    parts = [text.partition("=") for text in given or []]
    if wrong := ["".join(part) for part in parts if not all(part)]:
        raise ValueError(f"{name} must be name=value, got {wrong[0]!r}")
    return {key: value for key, _, value in parts}
