"""Edits: the changes of an experiment. A cell of a sweep is a list of edits, applied in one forward pass of all prompts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Interval = tuple[int, int]  # positions [start, stop)
NONE: Interval = (0, 0)
Rest = tuple[Any, ...]  # indices of the axes after batch and position


class WindowFunction(ABC):
    """A function of the values at contiguous positions of a site, applied to each position separately."""

    @abstractmethod
    def __call__(self, value: Tensor, first: int, n_pos: int) -> Tensor:
        """The new values, out of place. `value` has all axes of the site, and the positions from `first` on, of `n_pos`."""


@dataclass(frozen=True, eq=False)
class Edit:
    """New values at some positions of one site.

    Args:
        value: a tensor with the axes of the site [batch, pos, ...] that replaces the old values (axes of length 1 broadcast);
            or a function of the old values [batch, pos, ...], after indexing, that treats each position separately; or a
            `WindowFunction`, which gets all axes.
        positions: None: all. At scores and patterns [batch, head, query_pos, key_pos] the position is that of the query.
        rest: indices of the axes after the position, e.g. `(head,)`; at scores and patterns head and key.
        rows: the rows of the batch; None: all. At most one of `rows` and `rest` contains a list.
    """

    site: str
    value: Tensor | Callable[[Tensor], Tensor] | WindowFunction
    positions: tuple[int, ...] | None = None
    rest: Rest = ()
    rows: slice | list[int] | None = None

    def span(self, n_pos: int) -> Interval:
        """The smallest interval that contains all positions."""
        if self.positions is None:
            return 0, n_pos
        return (min(self.positions), max(self.positions) + 1) if self.positions else NONE

    def starting_at(self, first: int, n_pos: int) -> "Edit":
        """The edit restricted to the positions from `first` on."""
        positions = range(n_pos) if self.positions is None else self.positions
        return self if not first else replace(self, positions=tuple(pos for pos in positions if pos >= first))

    def write(self, value: Tensor, dims: tuple[str, ...], start: int, n_pos: int) -> None:
        """Applies the edit in place to values at a site with these axes: some positions from `start` on, of `n_pos`."""
        target = by_position(value, dims)
        rows: Any = slice(None) if self.rows is None else self.rows
        for first, stop in self._pieces(start, start + target.shape[1]):
            here = (rows, slice(first - start, stop - start), *self.rest)
            if isinstance(self.value, Tensor):
                source = self.source(target, dims, n_pos)
                target[here] = source[(rows, slice(first, stop), *self.rest)].to(target)
            elif isinstance(self.value, WindowFunction):
                target[here] = by_position(self.value(by_site(target[here], dims), first, n_pos), dims)
            else:
                target[here] = self.value(target[here])

    def source(self, target: Tensor, dims: tuple[str, ...], n_pos: int) -> Tensor:
        """The new values for all positions; raises ValueError if they do not broadcast."""
        assert isinstance(self.value, Tensor), "functions have no values"
        shape = (target.shape[0], n_pos, *target.shape[2:])
        value = dense(self.value)[(None,) * (len(dims) - self.value.ndim)]  # missing leading axes broadcast
        try:
            return by_position(value, dims).expand(shape)
        except (RuntimeError, IndexError):
            shown = "[" + ", ".join(dims) + "]"
            raise ValueError(
                f"the new value of '{self.site}' {shown} has shape {tuple(self.value.shape)}, which does not broadcast to "
                f"{shape} (batch, pos, ...)"
            ) from None

    def _pieces(self, start: int, stop: int) -> Iterator[Interval]:
        """Yields the positions of this edit in [start, stop) as contiguous intervals."""
        if self.positions is None:
            if start < stop:
                yield start, stop
            return
        inside = sorted(pos for pos in set(self.positions) if start <= pos < stop)
        while inside:
            length = next((i for i, pos in enumerate(inside) if pos != inside[0] + i), len(inside))
            yield inside[0], inside[0] + length
            inside = inside[length:]


class Input(Edit):
    """New values before all edits of a site, those of the base run included."""


@dataclass(frozen=True, eq=False)
class Rewrite:
    """A function of the whole value of a site, such as a hook; which parts it changes is not known."""

    site: str
    function: Callable[[Tensor], Tensor]


Change = Edit | Rewrite
Cell = Sequence[Change]


def dense(value: Tensor) -> Tensor:
    """The value as a dense tensor, since sparse ones can be neither reshaped nor expanded."""
    return value if value.layout == torch.strided else value.to_dense()


def by_position(value: Tensor, dims: tuple[str, ...]) -> Tensor:
    """A view of a value with the axis of (query) positions moved to axis 1."""
    return value.movedim(dims.index("query_pos"), 1) if "query_pos" in dims else value


def by_site(value: Tensor, dims: tuple[str, ...]) -> Tensor:
    """The inverse of `by_position`."""
    return value.movedim(1, dims.index("query_pos")) if "query_pos" in dims else value


def write_all(changes: Sequence[Change], value: Tensor, dims: tuple[str, ...]) -> Tensor:
    """Applies all changes of a site, in order, to a whole value; in place if possible.

    A value with an additional axis of heads has a copy for each head: each copy is changed separately.
    """
    if value.ndim > len(dims):
        return torch.stack([write_all(changes, copy, dims) for copy in value.clone().unbind(2)], 2)
    ours = True
    for change in changes:
        value = value if ours else value.clone()  # what a function returns may be a view, or a tensor that it keeps
        ours = isinstance(change, Edit)
        if isinstance(change, Edit):
            change.write(value, dims, 0, by_position(value, dims).shape[1])
        else:
            value = change.function(value)
    return value


def union(*intervals: Interval) -> Interval:
    """The smallest interval that contains all of these; empty ones are ignored."""
    filled = [(start, stop) for start, stop in intervals if stop > start]
    return (min(start for start, _ in filled), max(stop for _, stop in filled)) if filled else NONE


def overlap(one: Interval, other: Interval) -> Interval:
    """The intersection."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else NONE


def repeated(value: Tensor, n: int) -> Tensor:
    """The rows [batch, ...] repeated for `n` cells; a view if possible."""
    if n == 1:
        return value
    if value.shape[0] == 1:
        return value.expand(n, *value.shape[1:])
    return value.repeat(n, *[1] * (value.ndim - 1))
