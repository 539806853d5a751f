"""Parses indices along one axis: positions, heads, features, rows and layers.

An int is one index; a list, tuple, range or array of ints means these indices; a `slice` is a range. Negative indices count
from the end. (`Slice` and `pos_slice` belong to the HookedTransformer interface, where a tuple is a range.)
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, TypeGuard

import numpy as np
from torch import Tensor

from hooked_lm.hooks.slice import Slice

Indices = SupportsIndex | slice | Slice | Sequence[SupportsIndex] | Tensor | np.ndarray | None
Plain = int | list[int] | slice | None


def plain_indices(name: str, given: Any) -> Plain:
    """The indices as an int, a list of ints, a slice, or None for the whole axis.

    Raises TypeError for anything else, such as a mask.

    >>> plain_indices("heads", (0, 3)), plain_indices("heads", slice(0, 3))
    ([0, 3], slice(0, 3, None))
    """
    if given is None or type(given) is int:
        return given
    given = given.slice if isinstance(given, Slice) else given
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, slice):
        bounds = (given.start, given.stop, given.step)
        if not all(bound is None or _is_int(bound) for bound in bounds) or given.step == 0:
            raise TypeError(f"{name} must be ints, or a slice of ints with a step other than 0; got {given!r}")
        return slice(*(None if bound is None else operator.index(bound) for bound in bounds))
    several = given if isinstance(given, Iterable) else [given]
    if isinstance(given, str) or not all(map(_is_int, several)):
        raise TypeError(f"{name} must be integers, got {given!r}; for a mask pass mask.nonzero().flatten()")
    return [operator.index(one) for one in several] if isinstance(given, Iterable) else operator.index(given)


def indices_in(name: str, given: Plain, n: int, where: str = "") -> list[int]:
    """The nonnegative indices along an axis of length `n`, in the given order.

    Raises IndexError for an index that is out of range, and for an empty slice.

    >>> indices_in("heads", [0, -1], 4), indices_in("heads", slice(1, None), 4)
    ([0, 3], [1, 2, 3])
    """
    at = f" at '{where}'" if where else ""
    if given is None:
        return list(range(n))
    if isinstance(given, slice):
        found = list(range(n)[given])
        if not found:
            raise IndexError(f"{name}: {given} contains none of the {n} indices{at}")
        return found
    numbers = [given] if isinstance(given, int) else given
    for wrong in (i for i in numbers if not -n <= i < n):
        raise IndexError(f"{name} {wrong} is out of range{at}: there are {n}, so {-n} to {n - 1}")
    return [i % n for i in numbers]


def indices_of_slice(given: slice) -> list[int]:
    """The indices of a slice with nonnegative bounds, which does not depend on the length of the axis.

    Raises ValueError for a slice with an open stop or a negative bound.
    """
    start, step = given.start or 0, given.step or 1
    if given.stop is None or min(start, given.stop, step) < 0:
        raise ValueError(f"{given} has no fixed length: pass nonnegative start and stop, or a list")
    return list(range(start, given.stop, step))


def _is_int(value: object) -> TypeGuard[SupportsIndex]:
    return type(value) is int or (isinstance(value, SupportsIndex) and not isinstance(value, bool))
