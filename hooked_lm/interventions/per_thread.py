"""State of hook objects that several threads share."""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

__all__ = ["Lock", "PerThread"]

Value = TypeVar("Value")


class PerThread(Generic[Value]):
    """A separate value for each thread; copies and pickles start empty.

    >>> seen = PerThread(list)
    >>> seen.value.append(1)
    >>> seen.value
    [1]
    """

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[threading.Thread, Value] = WeakKeyDictionary()

    @property
    def value(self) -> Value:
        """The value of this thread, created by `make` on first use."""
        thread = threading.current_thread()
        if thread not in self._values:
            self._values[thread] = self._make()
        return self._values[thread]

    @value.setter
    def value(self, value: Value) -> None:
        self._values[threading.current_thread()] = value

    def empty_copy(self) -> "PerThread[Value]":
        """A copy without any values."""
        return PerThread(self._make)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make,)


class Lock:
    """A reentrant lock that can be copied and pickled; each copy is a new lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def empty_copy(self) -> "Lock":
        """A new lock."""
        return Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
