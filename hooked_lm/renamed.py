"""Former names of arguments, which are accepted with a warning for one minor version."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
GONE_IN = "0.2"


def renamed(**present: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function to accept former names of its arguments: `former="present"`.

    A former name warns with `DeprecationWarning`. Raises TypeError if both names are given.

    >>> @renamed(engine="executor")
    ... def run(executor: str = "processes") -> str:
    ...     return executor
    >>> run(executor="ray")
    'ray'
    """

    def of(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for former in present.keys() & kwargs.keys():
                name = present[former]
                if name in kwargs:
                    raise TypeError(f"{function.__name__}: {former}= is the former name of {name}=; give {name}= alone")
                warnings.warn(
                    f"{function.__name__}: {former}= is now {name}=; the former name goes in version {GONE_IN}",
                    DeprecationWarning,
                    stacklevel=2,
                )
                kwargs[name] = kwargs.pop(former)
            return function(*args, **kwargs)

        return call

    return of
