"""Selects the part of a value that a hook object records or changes: positions, heads, features, rows; also in generation.

Indices are those of `hooks/indices.py`: an int, several ints, or a slice. Outside generation a position is a column of the
value. During generation it is a token index in the row, without padding, and negative positions count from the end of the
prompt at every step. The result is the same with and without a key/value cache.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.head_labels import Heads
from hooked_lm.hooks.indices import Indices, Plain, indices_in, indices_of_slice, plain_indices

Positions = str | Indices
HEADS = ("head", "kv_head", "ssm_head")
QUERY_POSITIONS = ("pos", "query_pos")
WHOLE = slice(None)
MOST_UNNAMED = 3  # axes without names that are read as [batch, feature] or [batch, position, feature]
NAMED_POSITIONS = ("all", "prompt", "last_prompt", "generated")


def check_positions(given: Positions) -> str | Plain:
    """The positions as a name or as plain indices; ValueError for an unknown name, TypeError for what is no index."""
    if not isinstance(given, str):
        return plain_indices("positions", given)
    if given not in NAMED_POSITIONS:
        raise ValueError(f"positions must be numbers or one of {', '.join(NAMED_POSITIONS)}, got {given!r}")
    return given


@dataclass(frozen=True)
class VisiblePositions:
    """The positions of one row's sequence in a value: `n` columns from position `first` on (below 0: padding).

    The sequence is a prompt of `n_prompt` tokens and its continuation. `row` is None if all rows have the same positions.
    `columns` are those of the `n` that the value has; None: all.
    """

    first: int
    n: int
    n_prompt: int
    is_generating: bool = False
    row: int | None = None
    columns: Sequence[int] | None = None

    @classmethod
    def at(cls, hook: HookPoint, n: int) -> "list[VisiblePositions]":
        """The positions in a value with `n` columns, one entry per row if rows differ. Outside generation all are prompt."""
        if hook.columns is not None:
            return [replace(one, columns=hook.columns.shown) for one in cls.at(hook.columns.point, hook.columns.n)]
        positions, step = hook.positions, hook.step
        if positions is None or step is None or positions.shape[-1] != n:
            return [cls(0, n, n)]
        lasts = positions[..., -1].flatten().tolist()
        rows = [None] if positions.ndim == 1 else range(len(lasts))
        return [cls(last - n + 1, n, last + 1 - step, True, row) for row, last in zip(rows, lasts, strict=True)]

    def index(self, position: int) -> int:
        """Where the value has this position."""
        column = position - self.first
        return column if self.columns is None else bisect_left(self.columns, column)

    @property
    def here(self) -> Sequence[int]:
        """The positions that the value has, without padding."""
        if self.columns is None:
            return range(max(self.first, 0), self.first + self.n)
        return [self.first + column for column in self.columns if self.first + column >= 0]

    def chosen(self, given: Positions, where: str) -> dict[int, int]:
        """The selected positions in the value, each with its index in the selection `given`."""
        found: dict[int, int] = {}
        for position, order in self.listed(given, where):
            found.setdefault(position, order)
        return found

    def listed(self, given: Positions, where: str) -> list[tuple[int, int]]:
        """`chosen` as pairs, including positions that are given twice."""
        here = self.here
        if given is None or given == "all":
            return [(position, position) for position in here]
        if given == "prompt":
            return [(position, position) for position in here if position < self.n_prompt]
        if given == "generated":
            return [(position, position - self.n_prompt) for position in here if position >= self.n_prompt]
        if isinstance(given, slice):
            return self._in_slice(given, here, where)
        numbers = listed(given)
        for wrong in (i for i in numbers if i < -self.n_prompt or (i >= self.n_prompt and not self.is_generating)):
            raise IndexError(
                f"position {wrong} is out of range at '{where}': there are {self.n_prompt} positions, so {-self.n_prompt} "
                f"to {self.n_prompt - 1}"
            )
        resolved = [i if i >= 0 else self.n_prompt + i for i in numbers]
        return [(position, order) for order, position in enumerate(resolved) if position in here]

    def _in_slice(self, given: slice, here: Sequence[int], where: str) -> list[tuple[int, int]]:
        """`listed` for a slice; without a stop it includes generated tokens."""
        start, step = self._bound(given.start, 0), 1 if given.step is None else given.step
        stop = self._bound(given.stop, self.first + self.n)
        if step < 0:
            raise ValueError(f"positions={given} at '{where}': a slice of positions has a step above 0")
        wanted = range(start, stop, step)
        if not self.is_generating and not any(position in wanted for position in range(self.n_prompt)):
            raise IndexError(f"positions={given} contains none of the {self.n_prompt} positions at '{where}'")
        return [(position, wanted.index(position)) for position in here if position in wanted]

    def _bound(self, bound: int | None, default: int) -> int:
        """A bound of a slice; negative ones count from the end of the prompt."""
        return default if bound is None else bound if bound >= 0 else max(0, self.n_prompt + bound)


@dataclass(frozen=True)
class PositionMap:
    """The positions of a part: their axis, the positions in the value, and `orders`: position -> index in the selection."""

    axis: int
    shown: VisiblePositions
    orders: Mapping[int, int]


@dataclass(frozen=True)
class Part:
    """A part of a value: `indices` maps axis -> selected indices; other axes are selected whole.

    `along` is None at a site without positions; `orders` and `by_position` are for changes that depend on the position.
    `single` are the axes on which one index was selected by an int, `rows` the selected rows if this is the part of one of them.
    """

    where: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    indices: Mapping[int, Sequence[int]]
    along: PositionMap | None = None
    single: frozenset[int] = frozenset()
    rows: Sequence[int] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the part has no entries."""
        return any(not indices for indices in self.indices.values())

    @property
    def pos_axis(self) -> int | None:
        """The axis of positions, if there is one."""
        return None if self.along is None else self.along.axis

    @property
    def positions(self) -> tuple[int, ...] | None:
        """The selected positions; None for all."""
        return tuple(self.orders) if self.pos_axis in self.indices else None

    @property
    def index(self) -> list[slice | list[int]]:
        """The selected indices of each axis except that of the positions."""
        others = [axis for axis in range(len(self.shape)) if axis != self.pos_axis]
        return [_compact(self.indices.get(axis)) for axis in others]

    def has_positions(self, given: object, name: str = "value") -> bool:
        """Whether a tensor that broadcasts to the part differs between positions; raises ValueError as `aligned`."""
        if self.pos_axis is None or not isinstance(given, Tensor):
            return False
        return self.aligned(given, name).shape[self.pos_axis] > 1

    def aligned(self, given: Tensor, name: str = "value") -> Tensor:
        """A view of a tensor with all axes of the site, that broadcasts to the part.

        Axes on which one index is selected by an int may be missing, as in `value[:, -1] = given`; and leading ones. Raises
        ValueError, with both shapes, for a tensor that does not broadcast, or that does so in two ways.
        """
        sizes = [len(self.indices.get(axis, range(n))) for axis, n in enumerate(self.shape)]
        if self.rows is not None:
            sizes[0] = len(self.rows)
        others = [axis for axis in range(len(sizes)) if axis not in self.single]
        found = set()
        for axes in (range(len(sizes)), others):
            shape = dict(zip(reversed(axes), reversed(given.shape), strict=False))
            if given.ndim <= len(axes) and all(n in (1, sizes[axis]) for axis, n in shape.items()):
                found.add(tuple(shape.get(axis, 1) for axis in range(len(sizes))))
        if len(found) != 1:
            dropped = (
                f", or {tuple(sizes[axis] for axis in others)} without the axes of one index" if self.single else ""
            )
            how = "broadcasts in two ways" if found else "does not broadcast"
            fix = "; give all axes, those of one index with length 1" if found else ""
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}, which {how} to {tuple(sizes)}{dropped}, what is changed at "
                f"'{self.where}'{fix}"
            )
        view = given.reshape(*found)
        if self.rows is None or len(view) == 1:
            return view
        return view[[self.rows.index(row) for row in self.indices[0]]]

    @property
    def orders(self) -> Mapping[int, int]:
        """The positions of the part in the sequence, in the order of its values -> index in the selection.

        `{0: 0}` at a site without positions.
        """
        return {0: 0} if self.along is None else self.along.orders

    def take(self, value: Tensor) -> Tensor:
        """The part of a tensor that broadcasts to the value; broadcast axes (length 1) are kept."""
        for axis, indices in self.indices.items():
            if value.shape[axis] > 1 or self.shape[axis] == 1:
                value = value.index_select(axis, _tensor(indices, value))
        return value

    def replaced(self, value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """The value with its part changed, out of place, so that autograd follows the change."""
        return value if self.is_empty else _replaced(value, list(self.indices.items()), change)

    def by_position(self, numbers: Sequence[float], like: Tensor) -> Tensor:
        """One number for each position of the part as a tensor that broadcasts to it; one in all at a site without positions."""
        shape = [1] * len(self.shape)
        if self.along is not None:
            shape[self.along.axis] = len(numbers)
        return torch.tensor(numbers, dtype=like.dtype, device=like.device).view(shape)


def parts_of(
    value: Tensor,
    hook: HookPoint,
    positions: Positions = None,
    heads: Heads = None,
    features: Indices = None,
    rows: Indices = None,
    rest: Sequence[Indices] = (),
) -> list[Part]:
    """The selected part of a site's value; one part for each row if a generation has prompts of different lengths.

    Raises ValueError for an axis that the site lacks or that is selected twice, IndexError for an index out of range.
    """
    axes = _axes_of(hook.name, hook.dims, tuple(value.shape))
    _check_pos_axis(axes, positions)
    if len(rest) > len(axes.rest):
        raise ValueError(
            f"rest={rest!r} indexes {len(rest)} axes; '{axes.where}' has {len(axes.rest)} after batch and position"
        )
    given = [("rows", rows, axes.rows), ("heads", heads, axes.heads), ("features", features, axes.features)]
    given += [(f"rest[{i}]", index, axis) for i, (index, axis) in enumerate(zip(rest, axes.rest, strict=False))]
    found: dict[int, Sequence[int]] = {}
    for name, index, axis in given:
        if index is None:
            continue
        if axis in found:
            raise ValueError(f"{name}={index!r}: this axis of '{axes.where}' is selected twice")
        indices = _indices(name, index, axis, axes)
        found[axis] = list(dict.fromkeys(indices))  # type: ignore[index]  # `_indices` refuses None
    single = {axis for _, index, axis in [*given, ("", positions, axes.positions)] if _is_single(index)}
    part = Part(axes.where, axes.dims, tuple(value.shape), found, single=frozenset(single))  # type: ignore[arg-type]  # ints
    if axes.positions is None:
        return [part]
    shown_rows = VisiblePositions.at(hook, value.shape[axes.positions])
    return [
        _along(part, PositionMap(axes.positions, shown, shown.chosen(positions, axes.where))) for shown in shown_rows
    ]


def selected(
    value: Tensor,
    hook: HookPoint,
    positions: Positions = None,
    heads: Heads = None,
    features: Indices = None,
    rows: Indices = None,
    dims: tuple[str, ...] = (),
) -> Tensor:
    """The selected entries of a site's value, in the given order; all axes are kept.

    `dims` names the axes at a site without axis names. Raises as `parts_of`, and ValueError if a generation has prompts of
    different lengths and the rows have different numbers of selected positions.
    """
    axes = _axes_of(hook.name, hook.dims or dims, tuple(value.shape))
    _check_pos_axis(axes, positions)
    if positions is not None and axes.positions is not None:
        value = _at_positions(value, hook, positions, axes.positions, axes.where)
    for name, index, axis in (
        ("rows", rows, axes.rows),
        ("heads", heads, axes.heads),
        ("features", features, axes.features),
    ):
        if index is not None:
            indices = _compact(_indices(name, index, axis, axes))
            value = value[(WHOLE,) * axis + (indices,)]  # type: ignore[operator]  # `_indices` refuses None
    return value


def _at_positions(value: Tensor, hook: HookPoint, positions: Positions, axis: int, where: str) -> Tensor:
    """The value at some positions, whose columns may differ from row to row."""
    columns = [
        [shown.index(position) for position, _ in shown.listed(positions, where)]
        for shown in VisiblePositions.at(hook, value.shape[axis])
    ]
    if all(some == columns[0] for some in columns):
        return value[(WHOLE,) * axis + (_compact(columns[0]),)]
    if len({len(some) for some in columns}) > 1:
        raise ValueError(
            f"positions={positions!r} selects {[len(some) for some in columns]} positions in the rows at '{where}', which "
            "cannot be one tensor: give positions that all rows have"
        )
    index = _tensor(columns, value)
    shape = [len(index) if i == 0 else index.shape[1] if i == axis else 1 for i in range(value.ndim)]
    return value.take_along_dim(index.view(shape), axis)


def _check_pos_axis(axes: "AxisRoles", positions: Positions) -> None:
    if axes.positions is None and positions not in (None, "all"):
        raise ValueError(f"positions={positions!r}, and '{axes.where}' has no axis of positions{_unnamed(axes)}")


def _unnamed(axes: "AxisRoles") -> str:
    """The end of a message: what to do where the axes of a value have no names."""
    if axes.dims:
        return ""
    other = ": `rest=(2,)` of a controller selects index 2 of the axis after the batch"
    return f" (its axes have no names{other if len(axes.shape) > MOST_UNNAMED else ''})"


class AxisRoles(NamedTuple):
    """The axes of a value by role; None for a role without an axis. `rest` are the axes after batch and position."""

    where: str  # the site with its axes, for messages
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    rows: int | None
    positions: int | None
    heads: int | None
    features: int | None
    rest: tuple[int, ...]


@lru_cache(1024)
def _axes_of(name: str | None, names: tuple[str, ...], shape: tuple[int, ...]) -> AxisRoles:
    """The axes of a value of this shape at a site with these axis names (or no names)."""
    dims = names if len(names) == len(shape) else ()
    shown = [f"{dim} {n}" for dim, n in zip(dims, shape, strict=True)] if dims else map(str, shape)
    pos_axis = _position_axis(len(shape), names)
    return AxisRoles(
        where=f"{name} [{', '.join(shown)}]",
        dims=dims,
        shape=shape,
        rows=0 if shape and (not dims or dims[0] == "batch") else None,
        positions=pos_axis,
        heads=next((dims.index(dim) for dim in HEADS if dim in dims), None),
        features=len(shape) - 1 if dims or len(shape) <= MOST_UNNAMED else None,
        rest=tuple(axis for axis in range(1, len(shape)) if axis != pos_axis),
    )


def position_axis(value: Tensor, hook: HookPoint) -> int | None:
    """The axis of positions in a value of a site, or None; without axis names, axis 1 of three."""
    return _position_axis(value.ndim, hook.dims)


def _position_axis(n_axes: int, dims: tuple[str, ...]) -> int | None:
    if len(dims) != n_axes:
        return 1 if n_axes == MOST_UNNAMED else None
    return next((dims.index(name) for name in QUERY_POSITIONS if name in dims), None)


def listed(given: Positions) -> list[int]:
    """Positions given as ints, as "last_prompt" or as a slice with a start and a stop from the front, as a list.

    Raises ValueError for a slice with an open or negative end, whose length depends on the prompt.
    """
    if isinstance(given, slice):
        return indices_of_slice(given)
    return [-1] if given == "last_prompt" else [given] if isinstance(given, int) else list(given)  # type: ignore[arg-type]  # ints


def _along(part: Part, along: PositionMap) -> Part:
    """The part with the columns of its positions, and their row."""
    indices, shown = dict(part.indices), along.shown
    columns = [shown.index(position) for position in along.orders]
    if columns != list(range(part.shape[along.axis])):
        indices[along.axis] = columns
    rows = None
    if shown.row is not None:
        rows = indices.get(0, range(part.shape[0]))
        indices[0] = [row for row in rows if row == shown.row]
    return replace(part, indices=indices, along=along, rows=rows)


def _is_single(index: object) -> bool:
    """Whether an index is one int, as which `value[index]` would drop the axis."""
    return index == "last_prompt" if isinstance(index, str) else isinstance(index, int)


def _indices(name: str, given: Heads, axis: int | None, axes: "AxisRoles") -> list[int]:
    """The indices along one axis; ValueError if the site does not have it."""
    if axis is None:
        raise ValueError(f"{name}={given!r}, and '{axes.where}' has no such axis{_unnamed(axes)}")
    return indices_in(name, plain_indices(name, given), axes.shape[axis], axes.where)


def _replaced(value: Tensor, chosen: list[tuple[int, Sequence[int]]], change: Callable[[Tensor], Tensor]) -> Tensor:
    if not chosen:
        return change(value)
    (axis, indices), *others = chosen
    index = _tensor(indices, value)
    return value.index_copy(axis, index, _replaced(value.index_select(axis, index), others, change))


def _compact(indices: Sequence[int] | None) -> slice | list[int]:
    """Indices as a slice if they are a contiguous range."""
    if indices is None:
        return WHOLE
    first, n = indices[0] if indices else 0, len(indices)
    return slice(first, first + n) if list(indices) == list(range(first, first + n)) else list(indices)


def _tensor(indices: Sequence[int] | Sequence[Sequence[int]], like: Tensor) -> Tensor:
    return torch.tensor(indices, dtype=torch.long, device=like.device)
