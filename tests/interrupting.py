"""Running what is interrupted from a trace."""

from collections.abc import Callable, Iterator
from typing import Any


def in_a_generator(action: Callable[[], Any]) -> None:
    """Runs something whose exceptions may be left half handled.

    CPython does not always end the handling of an exception that a trace function interrupts. Later exceptions in the same
    thread would then have a context, and some of Python's own errors another type. A generator has its own.
    """

    def steps() -> Iterator[Any]:
        yield action()

    next(steps())
