"""Selects the part of a value that a controller changes: positions, heads, features, rows; also during generation.

Indices are those of `hooks/indices.py`: an int, several ints, or a slice. Outside generation a position is a column of the
value. During generation it is a token index in the row, without padding, and negative positions count from the end of the
prompt at every step. The result is the same with and without a key/value cache.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hooked_lm.engine.edit import Change, Edit
from hooked_lm.engine.values_like import is_positional
from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.indices import Indices, indices_in, indices_of_slice, plain_indices
from hooked_lm.interventions.base import Controller
from hooked_lm.interventions.window import Window

Positions = str | Indices
HEADS = ("head", "kv_head", "ssm_head")
QUERY_POSITIONS = ("pos", "query_pos")
WHOLE = slice(None)
PLACES = ("all", "prompt", "last_prompt", "generated")


@dataclass(frozen=True)
class Shown:
    """The positions of one row's sequence in a value: `n` columns from position `first` on (below 0: padding).

    The sequence is a prompt of `n_prompt` tokens and its continuation. `row` is None if all rows have the same positions.
    """

    first: int
    n: int
    n_prompt: int
    is_generating: bool = False
    row: int | None = None

    @classmethod
    def at(cls, hook: HookPoint, n: int) -> "list[Shown]":
        """The positions in a value with `n` columns, one entry per row if rows differ. Outside generation all are prompt."""
        positions, step = hook.positions, hook.step
        if positions is None or step is None or positions.shape[-1] != n:
            return [cls(0, n, n)]
        lasts = positions[..., -1].flatten().tolist()
        rows = [None] if positions.ndim == 1 else range(len(lasts))
        return [cls(last - n + 1, n, last + 1 - step, True, row) for row, last in zip(rows, lasts, strict=True)]

    def chosen(self, given: Positions, where: str) -> dict[int, int]:
        """The selected positions in the value, each with its index in the selection `given`."""
        here = range(max(self.first, 0), self.first + self.n)
        if given is None or given == "all":
            return {position: position for position in here}
        if given == "prompt":
            return {position: position for position in here if position < self.n_prompt}
        if given == "generated":
            return {position: position - self.n_prompt for position in here if position >= self.n_prompt}
        if isinstance(given, slice):
            return self._in_slice(given, here, where)
        numbers = listed(given)
        for wrong in (i for i in numbers if i < -self.n_prompt or (i >= self.n_prompt and not self.is_generating)):
            raise IndexError(
                f"position {wrong} is out of range at '{where}': there are {self.n_prompt} positions, so {-self.n_prompt} "
                f"to {self.n_prompt - 1}"
            )
        resolved = [i if i >= 0 else self.n_prompt + i for i in numbers]
        return {position: resolved.index(position) for position in dict.fromkeys(resolved) if position in here}

    def _in_slice(self, given: slice, here: range, where: str) -> dict[int, int]:
        """`chosen` for a slice; without a stop it includes generated tokens."""
        start, step = self._bound(given.start, 0), 1 if given.step is None else given.step
        stop = self._bound(given.stop, here.stop)
        if step < 0:
            raise ValueError(f"positions={given} at '{where}': a slice of positions has a step above 0")
        wanted = range(start, stop, step)
        if not self.is_generating and not any(position in wanted for position in here):
            raise IndexError(f"positions={given} contains none of the {self.n_prompt} positions at '{where}'")
        return {position: wanted.index(position) for position in here if position in wanted}

    def _bound(self, bound: int | None, default: int) -> int:
        """A bound of a slice; negative ones count from the end of the prompt."""
        return default if bound is None else bound if bound >= 0 else max(0, self.n_prompt + bound)


@dataclass(frozen=True)
class Along:
    """The positions of a part: their axis, the positions in the value, and `orders`: position -> index in the selection."""

    axis: int
    shown: Shown
    orders: Mapping[int, int]


@dataclass(frozen=True)
class Part:
    """A part of a value: `indices` maps axis -> selected indices; other axes are selected whole.

    `along` is None at a site without positions; `orders` and `by_position` are for changes that depend on the position.
    """

    where: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    indices: Mapping[int, Sequence[int]]
    along: Along | None = None

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

    def has_positions(self, given: Any) -> bool:
        """Whether a tensor that broadcasts to the part, or to the whole value, differs between positions."""
        if self.pos_axis is None or not isinstance(given, Tensor):
            return False
        axis = self.pos_axis - len(self.shape) + given.ndim
        return axis >= 0 and given.shape[axis] > 1

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
    heads: Indices = None,
    features: Indices = None,
    rows: Indices = None,
    rest: Sequence[Indices] = (),
) -> list[Part]:
    """The selected part of a site's value; one part for each row if a generation has prompts of different lengths.

    Raises ValueError for an axis that the site lacks or that is selected twice, IndexError for an index out of range.
    """
    axes = _axes_of(hook.name, hook.dims, tuple(value.shape))
    where, pos_axis = axes.where, axes.positions
    if pos_axis is None and positions not in (None, "all"):
        raise ValueError(f"positions={positions!r}, and '{where}' has no axis of positions")
    if len(rest) > len(axes.rest):
        raise ValueError(
            f"rest={rest!r} indexes {len(rest)} axes; '{where}' has {len(axes.rest)} after batch and position"
        )
    found: dict[int, Sequence[int]] = {}
    for name, index, axis in (
        ("rows", rows, axes.rows),
        ("heads", heads, axes.heads),
        ("features", features, axes.features),
    ):
        if index is not None:
            _add(found, name, index, axis, value.shape, where)
    for i, (index, axis) in enumerate(zip(rest, axes.rest, strict=False)):
        if index is not None:
            _add(found, f"rest[{i}]", index, axis, value.shape, where)
    part = Part(where, axes.dims, tuple(value.shape), found)
    if pos_axis is None:
        return [part]
    shown_rows = Shown.at(hook, value.shape[pos_axis])
    return [_along(part, Along(pos_axis, shown, shown.chosen(positions, where))) for shown in shown_rows]


class Axes(NamedTuple):
    """The axes of a value by role; None for a role without an axis. `rest` are the axes after batch and position."""

    where: str  # the site with its axes, for messages
    dims: tuple[str, ...]
    rows: int | None
    positions: int | None
    heads: int | None
    features: int
    rest: tuple[int, ...]


@lru_cache(1024)
def _axes_of(name: str | None, names: tuple[str, ...], shape: tuple[int, ...]) -> Axes:
    """The axes of a value of this shape at a site with these axis names (or no names)."""
    dims = names if len(names) == len(shape) else ()
    shown = [f"{dim} {n}" for dim, n in zip(dims, shape, strict=True)] if dims else map(str, shape)
    pos_axis = _position_axis(len(shape), names)
    return Axes(
        where=f"{name} [{', '.join(shown)}]",
        dims=dims,
        rows=0 if shape and (not dims or dims[0] == "batch") else None,
        positions=pos_axis,
        heads=next((dims.index(dim) for dim in HEADS if dim in dims), None),
        features=len(shape) - 1,
        rest=tuple(axis for axis in range(1, len(shape)) if axis != pos_axis),
    )


@dataclass(eq=False, repr=False)
class LocalController(Controller):
    """Changes a part of a site's value; the rest is unchanged.

    Args (of all subclasses):
        positions: an int, several ints, a slice, "prompt", "last_prompt" (the last of the prompt), "generated" (tokens that
            generation added) or "all". Negative ones count from the end of the prompt. A slice without a stop includes
            generated tokens. None: "all".
        heads: indices of heads (of keys and values: key/value heads). None: all.
        features: indices of the last axis: neurons, dimensions of the stream.
        rows: indices of the batch.
        rest: for each axis after batch and position the indices, or None for all; e.g. `(3,)` is head 3 at `hook_z`, and
            head 3 at `hook_pattern`, where the position is that of the query.

    All indices are an int, a list, tuple or array of ints, or a `slice`.

    Raises TypeError for an index that is not an int, such as a mask; in the forward pass, ValueError for an axis that the site
    does not have and for a site without floating-point values, IndexError for an index out of range.
    """

    positions: Positions = field(default=None, kw_only=True)
    heads: Indices = field(default=None, kw_only=True)
    features: Indices = field(default=None, kw_only=True)
    rows: Indices = field(default=None, kw_only=True)
    rest: Sequence[Indices] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.positions, str) and self.positions not in PLACES:
            raise ValueError(f"positions must be numbers or one of {', '.join(PLACES)}, got {self.positions!r}")
        if not isinstance(self.positions, str):
            self.positions = plain_indices("positions", self.positions)
        self.heads, self.features, self.rows = (
            plain_indices(name, getattr(self, name)) for name in ("heads", "features", "rows")
        )
        self.rest = tuple(plain_indices("rest", index) for index in self.rest)

    def __call__(self, value: Any, hook: HookPoint) -> Any:
        if not self.is_enabled:
            return None
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            got = f"numbers of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"{type(self).__name__} changes activations, and '{hook.name}' passes {got}; to change token ids, change the "
                "model's input, or use a hook function"
            )
        return super().__call__(value, hook)

    def parts(self, value: Tensor, hook: HookPoint, positions: Positions = None) -> list[Part]:
        """The parts of this value to change; `positions` is the default for the setting of that name."""
        given = positions if self.positions is None else self.positions
        return parts_of(value, hook, given, self.heads, self.features, self.rows, self.rest)

    # ---- as a cell of a sweep ----------------------------------------------------------------------------------------

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "acts_by_position" not in own and any(name in own for name in ("__call__", "change", "edit", "made")):
            cls.acts_by_position = LocalController.acts_by_position  # type: ignore[method-assign]  # unknown for a new rule

    def acts_by_position(self, part: Part) -> bool:
        """Whether the new value at each position depends on the value at that position alone.

        If so, it is an `Edit` in sweeps, and `change` gets some of the positions at a time.
        """
        return False

    def replacement(self, like: Tensor, part: Part, hook: HookPoint) -> Tensor | None:
        """The new values if they do not depend on the old ones, broadcastable to the site's value; None otherwise."""
        return None

    def as_edit(self, point: HookPoint, like: Tensor | None = None) -> Change:
        if like is None or not is_positional(like, point.dims):
            return super().as_edit(point, like)
        [part] = self.parts(like, point)
        if part.pos_axis is None or not self.acts_by_position(part):
            return super().as_edit(point, like)
        positions, site = part.positions, point.name or ""
        if part.is_empty:
            return Edit(site, torch.zeros([1] * like.ndim), ())
        new, index = self.replacement(like, part, point), part.index
        if new is None or not all(
            n in (1, size) for n, size in zip(reversed(new.shape), reversed(like.shape), strict=False)
        ):
            self.change(like, point)  # raises for settings that do not fit the site
        if new is None or sum(isinstance(some, list) for some in index) > 1:
            return Edit(site, Window(self, site, point.dims, part.pos_axis), positions)
        rows, *rest = index
        while rest and rest[-1] == WHOLE:
            rest.pop()
        return Edit(site, new, positions, tuple(rest), None if rows == WHOLE else rows)


@dataclass(eq=False, repr=False)
class PartEditor(LocalController):
    """Base class for your own controllers: computes the new values of a part from the old ones alone.

    A subclass is a dataclass of its settings and defines `edit`. `acts_by_position` says whether it can share the forward
    passes of a sweep; see docs/interventions.md.
    """

    def change(self, value: Any, hook: HookPoint) -> Any:
        for part in self.parts(value, hook):
            value = part.replaced(value, partial(self.edit, part=part))
        return value

    @abstractmethod
    def edit(self, value: Tensor, part: Part) -> Tensor:
        """The new values of a part, with all axes of the site; must not change `value` in place."""


def position_axis(value: Tensor, hook: HookPoint) -> int | None:
    """The axis of positions in a value of a site, or None; without axis names, axis 1 of at least three."""
    return _position_axis(value.ndim, hook.dims)


def _position_axis(n_axes: int, dims: tuple[str, ...]) -> int | None:
    if len(dims) != n_axes:
        return 1 if n_axes >= 3 else None
    return next((dims.index(name) for name in QUERY_POSITIONS if name in dims), None)


def listed(given: Any) -> list[int]:
    """Positions given as ints, as "last_prompt" or as a slice with a start and a stop from the front, as a list.

    Raises ValueError for a slice with an open or negative end, whose length depends on the prompt.
    """
    if isinstance(given, slice):
        return indices_of_slice(given)
    return [-1] if given == "last_prompt" else [given] if isinstance(given, int) else list(given)


def check_finite(hook: Any, *names: str) -> None:
    """Raises ValueError for settings that are or contain NaN, infinity or an int too large for a float; None is allowed."""
    for name in names:
        given = getattr(hook, name)
        for one in given if isinstance(given, (list, tuple)) else [given]:
            if one is None or callable(one):
                continue
            if not (bool(one.isfinite().all()) if isinstance(one, Tensor) else abs(one) <= sys.float_info.max):
                raise ValueError(f"{name} of {type(hook).__name__} must be finite, got {repr(given)[:80]}")


def fitted(given: Tensor, like: Tensor, part: Part, what: str) -> Tensor:
    """`given` broadcast to the shape of a part, in its dtype; raises ValueError, with both shapes, if it does not broadcast."""
    try:
        return given.to(like).expand_as(like)
    except RuntimeError:
        raise ValueError(
            f"{what} has shape {tuple(given.shape)}, which does not broadcast to {tuple(like.shape)}, what is changed at "
            f"'{part.where}'"
        ) from None


def _along(part: Part, along: Along) -> Part:
    """The part with the columns of its positions, and their row."""
    indices, shown = dict(part.indices), along.shown
    columns = [position - shown.first for position in along.orders]
    if columns != list(range(shown.n)):
        indices[along.axis] = columns
    if shown.row is not None:
        indices[0] = [row for row in indices.get(0, [shown.row]) if row == shown.row]
    return Part(part.where, part.dims, part.shape, indices, along)


def _add(
    found: dict[int, Sequence[int]], name: str, index: Any, axis: int | None, shape: Sequence[int], where: str
) -> None:
    """Adds the indices of one axis to `found`."""
    if axis is None:
        raise ValueError(f"{name}={index!r}, and '{where}' has no such axis")
    if axis in found:
        raise ValueError(f"{name}={index!r}: this axis of '{where}' is asked for twice")
    found[axis] = list(dict.fromkeys(indices_in(name, plain_indices(name, index), shape[axis], where)))


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


def _tensor(indices: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, dtype=torch.long, device=like.device)
