"""Selects the part of a value that a hook object records or changes: positions, heads, features, rows; also in generation.

Indices are those of `hooks/indices.py`: an int, several ints, or a slice; positions those of `positions.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.head_labels import Heads
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices
from hooked_lm.hooks.recorder import MOST_UNNAMED, position_axis
from hooked_lm.interventions.positions import Positions, VisiblePositions

HEADS = ("head", "kv_head", "ssm_head")
WHOLE = slice(None)


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
    shown_rows = VisiblePositions.at(hook, value.shape[axes.positions], positions)
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
        for shown in VisiblePositions.at(hook, value.shape[axis], positions)
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
    pos_axis = position_axis(len(shape), names)
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
