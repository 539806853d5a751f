"""Former names of arguments, classes and functions, which are accepted with a warning for one minor version."""

from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from hooked_lm.callers import warn_caller

P = ParamSpec("P")
R = TypeVar("R")
GONE_IN = "0.2"
# the present name; or that and the present values of former ones
Present = str | tuple[str, Mapping[str, str | None]]


def renamed(**present: Present) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function to accept former names of its arguments: `former="present"`.

    Values that have other names too are given as a mapping beside: `ablation=("replace_with", {"resample": "corrupted"})`.
    A former name warns with `DeprecationWarning`. Raises TypeError if both names are given.

    >>> @renamed(engine="executor")
    ... def run(executor: str = "processes") -> str:
    ...     return executor
    >>> run(executor="ray")
    'ray'
    """

    def of(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for message in _rename(kwargs, present, name):
                warn_caller(message, DeprecationWarning)
            return function(*args, **kwargs)

        vars(call)["_former"] = present
        return call

    return of


def in_present_names(function: Callable[..., Any], options: Mapping[str, object]) -> dict[str, object]:
    """Keyword arguments for a function, those in former names of its arguments in the present ones; warns of each."""
    given = dict(options)
    for message in _rename(given, getattr(function, "_former", {}), function.__name__):
        warn_caller(message, DeprecationWarning)
    return given


def _rename(kwargs: dict[str, Any], present: Mapping[str, Present], function: str) -> list[str]:
    """Moves arguments given by former names to their present ones; returns a message for each."""
    messages = []
    for former in present.keys() & kwargs.keys():
        to = present[former]
        name, values = (to, {}) if isinstance(to, str) else to
        if name in kwargs:
            raise TypeError(f"{function}: {former}= is the former name of {name}=; give {name}= alone")
        value = kwargs.pop(former)
        kwargs[name] = values.get(value, value) if isinstance(value, str) else value
        messages.append(f"{function}: {former}= is now {name}=; the former name goes in version {GONE_IN}")
    return messages


def former_names(module: str, **present: str) -> Callable[[str], object]:
    """The `__getattr__` of a module whose names have changed: a former name warns, and is the present one.

    >>> import warnings
    >>> find = former_names("hooked_lm.viz", Strip="report")
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     find("Strip").__name__
    'report'
    """

    def find(name: str) -> object:
        if name not in present:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        now = present[name]
        message = f"{module}.{name} is now {now}; the former name goes in version {GONE_IN}"
        warn_caller(message, DeprecationWarning)
        return getattr(import_module(module), now)

    return find
