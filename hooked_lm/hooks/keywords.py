"""Checks the names of keyword arguments that a function passes on."""

from collections.abc import Collection, Iterable

from hooked_lm.hooks.select import nearest


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises TypeError for an argument that is not known, with similar names.

    >>> check_keywords("train", ["widht"], ["width", "steps"])
    Traceback (most recent call last):
    ...
    TypeError: train has no argument 'widht'; did you mean 'width', 'steps'?
    """
    for name in given:
        if name not in known:
            near = ", ".join(map(repr, nearest(name, known)))
            raise TypeError(f"{function} has no argument {name!r}; did you mean {near or 'none at all'}?")
