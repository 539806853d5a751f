"""Checks the arguments of a call, and names the nearest of those that there are."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import Parameter, Signature


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The three names that are most similar to a name, the best first."""
    return difflib.get_close_matches(str(name), names, n=3, cutoff=0.0)


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


def check_arguments(function: str, wanted: Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raises TypeError for an unknown keyword argument, and for an argument by position that must be given by name.

    >>> from inspect import signature
    >>> def scale(site, *, factor=1.0, heads=None): ...
    >>> check_arguments("scale", signature(scale), ["z", 0.5], {})
    Traceback (most recent call last):
    ...
    TypeError: scale takes site by position and all else by name, got 0.5 as well: give its name (factor, heads)
    """
    kinds = {name: one.kind for name, one in wanted.parameters.items()}
    if Parameter.VAR_KEYWORD not in kinds.values():
        check_keywords(function, kwargs, kinds)
    first = [
        name for name, kind in kinds.items() if kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(args) > len(first) and Parameter.VAR_POSITIONAL not in kinds.values():
        names = ", ".join(name for name in kinds if name not in first)
        more = ", ".join(" ".join(repr(one).split())[:80] for one in args[len(first) :])
        raise TypeError(
            f"{function} takes {', '.join(first)} by position and all else by name, got {more} as well: give its name "
            f"({names})"
        )
