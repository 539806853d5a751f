"""Answers a wrong keyword argument with the name that is meant: of each function that a package exports, and each method."""

import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from inspect import CO_VARKEYWORDS, Parameter, Signature, signature, unwrap
from traceback import walk_tb
from types import FunctionType
from typing import Any, cast

PACKAGE = __name__.partition(".")[0]
BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")


def nearest(name: str, names: Iterable[str], cutoff: float = 0.0) -> list[str]:
    """The three names that are most similar to a name, the best first."""
    return difflib.get_close_matches(str(name), names, n=3, cutoff=cutoff)


class UnknownKeyword(TypeError):
    """A keyword argument that a function does not have, with similar ones, or else all.

    >>> print(UnknownKeyword("train", "widht", ("width", "steps")))
    train has no argument 'widht'; did you mean 'width'?
    >>> print(UnknownKeyword("train", "colour", ("width", "steps")))
    train has no argument 'colour'; it takes width, steps
    """

    def __init__(self, function: str, name: str, known: Collection[str]) -> None:
        super().__init__(function, name, known)  # so that pickle makes an equal one
        self.function, self.name, self.known = function, name, known

    def __str__(self) -> str:
        near = ", ".join(map(repr, nearest(self.name, self.known, 0.6)))
        hint = f"did you mean {near}?" if near else f"it takes {', '.join(self.known) or 'none by name'}"
        return f"{self.function} has no argument {self.name!r}; {hint}"


def check_keywords(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises UnknownKeyword, a TypeError, for an argument that is not known.

    >>> check_keywords("train", ["steps", "widht"], ["width", "steps"])
    Traceback (most recent call last):
    ...
    hooked_lm.keywords.UnknownKeyword: train has no argument 'widht'; did you mean 'width'?
    """
    for name in given:
        if name not in known:
            raise UnknownKeyword(function, name, tuple(known))


def check_arguments(function: str, wanted: Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raises TypeError for an unknown keyword argument, and for an argument by position that must be given by name.

    >>> def scale(site, *, factor=1.0, heads=None): ...
    >>> check_arguments("scale", signature(scale), ["z", 0.5], {})
    Traceback (most recent call last):
    ...
    TypeError: scale takes site by position and all else by name, got 0.5 as well: give its name (factor, heads)
    """
    kinds = {name: one.kind for name, one in wanted.parameters.items()}
    if Parameter.VAR_KEYWORD not in kinds.values():
        check_keywords(function, kwargs, [name for name, kind in kinds.items() if kind in BY_NAME])
    first = [name for name, kind in kinds.items() if kind in BY_POSITION]
    if len(args) > len(first) < len(kinds) and Parameter.VAR_POSITIONAL not in kinds.values():
        names = ", ".join(name for name in kinds if name not in first)
        more = ", ".join(" ".join(repr(one).split())[:80] for one in args[len(first) :])
        raise TypeError(
            f"{function} takes {', '.join(first) or 'nothing'} by position and all else by name, got {more} as well: give "
            f"its name ({names})"
        )


def answer_keywords(module: str, names: Iterable[str] | None = None) -> None:
    """From now on what a module exports answers wrong arguments as `check_arguments` does; None: all of its `__all__`.

    These are functions and classes, with the other public classes of the files that they come from, such as those of results.
    Of a class it is the constructor and the public methods, inherited ones too; none of a class with `answers_keywords = False`,
    which a run calls at each site, and of one with a `forward`, which a run enters, the constructor alone. A function that comes
    from elsewhere is not touched: it may be in a table there. Nothing is looked up unless a call has raised a TypeError, which
    stays the same unless the arguments of that call are at fault.
    """
    exported = sys.modules[module]
    for name in list(exported.__all__ if names is None else names):
        value = getattr(exported, name)
        if not isinstance(value, (type, FunctionType)) or not is_ours(value):
            continue
        if isinstance(value, FunctionType):
            if not value.__module__.startswith(module):
                continue
            for place in (exported, sys.modules[value.__module__]):  # one function by either name
                if vars(place).get(name) is value:
                    setattr(place, name, _answering(value, 0))
        _answer_in_classes(value.__module__)


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == PACKAGE


@cache
def _answer_in_classes(module: str) -> None:
    for name, kind in list(vars(sys.modules[module]).items()):
        if isinstance(kind, type) and kind.__module__ == module and not name.startswith("_"):
            for base in filter(is_ours, kind.__mro__):
                _answer_in_class(base)


@cache
def _answer_in_class(kind: type) -> None:
    if not vars(kind).get("answers_keywords", True):
        return
    in_a_run = "forward" in vars(kind)  # a run enters its methods
    for name, value in list(vars(kind).items()):
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and (name == "__init__" or not (in_a_run or name.startswith("_"))):
            answering = _answering(function, int(not isinstance(value, staticmethod)))
            setattr(kind, name, answering if value is function else type(value)(answering))


@cache
def _answering(function: FunctionType, n_bound: int) -> FunctionType:
    """The function, which answers wrong arguments; `n_bound` counts those that a method call gives by itself."""
    code = function.__code__
    takes_names = code.co_argcount > n_bound or code.co_kwonlyargcount or code.co_flags & CO_VARKEYWORDS
    if "_answers" in vars(function) or not takes_names:
        return function

    @wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            explain(error, function, args, kwargs, n_bound)
            raise

    vars(call)["_answers"] = True
    return cast(FunctionType, call)


def explain(
    error: TypeError, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], bound: int
) -> None:
    """Raises a better error than that of a call if its arguments did not fit, or one that it passed on."""
    name = type(args[0]).__name__ if function.__name__ == "__init__" and args else function.__name__
    wanted = signature(function)
    wanted = wanted.replace(parameters=list(wanted.parameters.values())[bound:])
    body = cast(FunctionType, unwrap(function)).__code__
    if all(frame.f_code is not body for frame, _ in walk_tb(error.__traceback__)):  # the call did not begin
        former = getattr(function, "_former", {})
        try:
            check_arguments(name, wanted, args[bound:], {key: kwargs[key] for key in kwargs if key not in former})
        except TypeError as better:
            raise better from None
    known = [key for key, one in wanted.parameters.items() if one.kind in BY_NAME]
    if isinstance(error, UnknownKeyword) and error.name in kwargs and error.name not in known:
        raise UnknownKeyword(name, error.name, tuple(dict.fromkeys([*known, *error.known]))) from None
    passed = UNEXPECTED.search(str(error))
    if passed and passed[1] in kwargs and passed[1] not in known and nearest(passed[1], known, 0.6):
        raise UnknownKeyword(name, passed[1], known) from error
