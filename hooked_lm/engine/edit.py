"""Edits: what an experiment changes in a run. A cell of a sweep is a list of them; each cell is one run of all prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Interval = tuple[int, int]  # positions from the first to before the second
NONE: Interval = (0, 0)
Rest = tuple[Any, ...]  # indices of the axes after batch and position


@dataclass(frozen=True, eq=False)
class Edit:
    """New values at some positions of one site.

    `value` has the axes of the site [batch, pos, ...] and takes over where the edit is, axes of length 1 for all; or it is a
    function of what is there, [batch, pos, ...] with the axes that an index leaves, that treats each position by itself.
    `positions` says where, None: everywhere; `rest` indexes the axes after the position, e.g. `(head,)`. At scores and patterns
    [batch, head, query_pos, key_pos] the position is that of the query, and `rest` goes on with head and key.
    """

    site: str
    value: Tensor | Callable[[Tensor], Tensor]
    positions: tuple[int, ...] | None = None
    rest: Rest = ()

    def span(self, n_pos: int) -> Interval:
        """From the first position to after the last."""
        if self.positions is None:
            return 0, n_pos
        return (min(self.positions), max(self.positions) + 1) if self.positions else NONE

    def covers(self, interval: Interval) -> bool:
        """Whether nothing of what was at the site remains at these positions; a function makes its value of it."""
        if not isinstance(self.value, Tensor):
            return False
        return self.rest == () and (self.positions is None or set(self.positions) >= set(range(*interval)))

    def starting_at(self, first: int, n_pos: int) -> "Edit":
        """The same from a position on."""
        positions = range(n_pos) if self.positions is None else self.positions
        return self if not first else replace(self, positions=tuple(pos for pos in positions if pos >= first))

    def write(self, value: Tensor, dims: tuple[str, ...], start: int, n_pos: int) -> None:
        """Change values in place, at a site with these axes; they begin at position `start` of `n_pos`, and need not reach
        to the end."""
        target = by_position(value, dims)
        for first, stop in self._pieces(start, start + target.shape[1]):
            here = (slice(None), slice(first - start, stop - start), *self.rest)
            if isinstance(self.value, Tensor):
                source = self.source(target, dims, n_pos)
                target[here] = source[(slice(None), slice(first, stop), *self.rest)].to(target)
            else:
                target[here] = self.value(target[here])

    def source(self, target: Tensor, dims: tuple[str, ...], n_pos: int) -> Tensor:
        """The new values for all positions; raises ValueError if they do not fit."""
        assert isinstance(self.value, Tensor), "functions have no values"
        shape = (target.shape[0], n_pos, *target.shape[2:])
        value = dense(self.value)[(None,) * (len(dims) - self.value.ndim)]  # axes that it lacks are all alike
        try:
            return by_position(value, dims).expand(shape)
        except (RuntimeError, IndexError):
            shown = "[" + ", ".join(dims) + "]"
            raise ValueError(
                f"the new value of '{self.site}' {shown} has shape {tuple(self.value.shape)}, which does not broadcast to "
                f"{shape} (batch, pos, ...)"
            ) from None

    def _pieces(self, start: int, stop: int) -> Iterator[Interval]:
        """The positions of this edit from `start` to before `stop`, those side by side together."""
        if self.positions is None:
            yield start, stop
            return
        inside = sorted(pos for pos in set(self.positions) if start <= pos < stop)
        while inside:
            length = next((i for i, pos in enumerate(inside) if pos != inside[0] + i), len(inside))
            yield inside[0], inside[0] + length
            inside = inside[length:]


@dataclass(frozen=True, eq=False)
class Rewrite:
    """A function of the whole value of a site, as a hook is one; nothing is known of what it touches."""

    site: str
    function: Callable[[Tensor], Tensor]


Change = Edit | Rewrite
Cell = Sequence[Change]


def dense(value: Tensor) -> Tensor:
    """The same numbers in a plain tensor: sparse ones can be neither reshaped nor expanded."""
    return value if value.layout == torch.strided else value.to_dense()


def by_position(value: Tensor, dims: tuple[str, ...]) -> Tensor:
    """A view in which the position of a value at a site with these axes comes second."""
    return value.movedim(dims.index("query_pos"), 1) if "query_pos" in dims else value


def write_all(changes: Sequence[Change], value: Tensor, dims: tuple[str, ...]) -> Tensor:
    """All changes of a site, in order, of a whole value of the run of a cell; in place where they allow it.

    A value with an axis of heads that the site does not have shows copies per head: each is changed by itself.
    """
    if value.ndim > len(dims):
        return torch.stack([write_all(changes, copy, dims) for copy in value.clone().unbind(2)], 2)
    for change in changes:
        if isinstance(change, Edit):
            change.write(value, dims, 0, by_position(value, dims).shape[1])
        else:
            value = change.function(value)
    return value


def union(*intervals: Interval) -> Interval:
    """The smallest interval around these; empty ones count for nothing."""
    filled = [(start, stop) for start, stop in intervals if stop > start]
    return (min(start for start, _ in filled), max(stop for _, stop in filled)) if filled else NONE


def overlap(one: Interval, other: Interval) -> Interval:
    """What both have."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else NONE


def repeated(value: Tensor, n: int) -> Tensor:
    """The rows [batch, ...] `n` times over, cell by cell; no copy where a view can say it."""
    if n == 1:
        return value
    if value.shape[0] == 1:
        return value.expand(n, *value.shape[1:])
    return value.repeat(n, *[1] * (value.ndim - 1))
