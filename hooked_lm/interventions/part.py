"""Which part of a value an intervention is about: positions, heads, features, rows; in generation too.

Positions are counted from 0 along the value's own axis; negative ones from its end. During generation they are those of each
row's tokens, padding left out, and negative ones count from the end of the prompt, wherever the generation stands: an object
changes a token once, when it is read, and the same with a key/value cache as without.
"""

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.interventions.base import Controller

Index = SupportsIndex | Sequence[SupportsIndex] | Tensor | np.ndarray | None
Positions = str | Index
PLACES = ("all", "prompt", "last_prompt", "generated")


@dataclass(frozen=True)
class Shown:
    """What a value shows of one row's sequence: `n` columns, the first of them position `first` (below 0: padding), of a prompt
    of `n_prompt` tokens and what follows. `row` is None where all rows are alike."""

    first: int
    n: int
    n_prompt: int
    is_generating: bool = False
    row: int | None = None

    @classmethod
    def at(cls, hook: HookPoint, n: int) -> "list[Shown]":
        """What a value with `n` positions shows, row by row if they differ. Outside generation: everything, all of it prompt."""
        positions, step = hook.positions, hook.step
        if positions is None or step is None or positions.shape[-1] != n:
            return [cls(0, n, n)]
        lasts = positions[..., -1].flatten().tolist()
        rows = [None] if positions.ndim == 1 else range(len(lasts))
        return [cls(last - n + 1, n, last + 1 - step, True, row) for row, last in zip(rows, lasts, strict=True)]

    def chosen(self, asked: Positions, where: str) -> dict[int, int]:
        """The positions asked for that are shown, and which of those asked for each is."""
        here = range(max(self.first, 0), self.first + self.n)
        if asked is None or asked == "all":
            return {position: position for position in here}
        if asked == "prompt":
            return {position: position for position in here if position < self.n_prompt}
        if asked == "generated":
            return {position: position - self.n_prompt for position in here if position >= self.n_prompt}
        numbers = listed(asked)
        for wrong in (i for i in numbers if i < -self.n_prompt or (i >= self.n_prompt and not self.is_generating)):
            raise IndexError(
                f"position {wrong} is out of range at '{where}': there are {self.n_prompt} positions, so {-self.n_prompt} "
                f"to {self.n_prompt - 1}"
            )
        resolved = [i if i >= 0 else self.n_prompt + i for i in numbers]
        return {position: resolved.index(position) for position in dict.fromkeys(resolved) if position in here}


@dataclass(frozen=True)
class Along:
    """The positions of a part: their axis, what the value shows, and for each which of those asked for it is."""

    axis: int
    shown: Shown
    orders: Mapping[int, int]


@dataclass(frozen=True)
class Part:
    """A part of a value: the indices that are taken of some axes; other axes are taken whole. `along` is None where a site has
    no positions."""

    where: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    indices: Mapping[int, Sequence[int]]
    along: Along | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is taken."""
        return any(not indices for indices in self.indices.values())

    @property
    def pos_axis(self) -> int | None:
        """Where the position stands."""
        return None if self.along is None else self.along.axis

    @property
    def orders(self) -> Mapping[int, int]:
        """The positions, and which of those asked for each is; where a site has none, everything is one."""
        return {0: 0} if self.along is None else self.along.orders

    def take(self, value: Tensor) -> Tensor:
        """The part of a tensor like the value; axes of length 1 stand for all and stay."""
        for axis, indices in self.indices.items():
            if value.shape[axis] > 1 or self.shape[axis] == 1:
                value = value.index_select(axis, _tensor(indices, value))
        return value

    def replaced(self, value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """The value with its part changed, in new memory, so that the gradient changes with it."""
        return value if self.is_empty else _replaced(value, list(self.indices.items()), change)

    def by_position(self, numbers: Sequence[float], like: Tensor) -> Tensor:
        """A number for each position of the part, with axes to broadcast; one for all where a site has no positions."""
        shape = [1] * len(self.shape)
        if self.along is not None:
            shape[self.along.axis] = len(numbers)
        return torch.tensor(numbers, dtype=like.dtype, device=like.device).view(shape)


def parts_of(
    value: Tensor,
    hook: HookPoint,
    positions: Positions = None,
    heads: Index = None,
    features: Index = None,
    rows: Index = None,
    rest: Sequence[Index] = (),
) -> list[Part]:
    """The part of the value of a site that is asked for; a part for each row of a generation from unequal prompts.

    Raises ValueError for an axis that the site has not or that is asked for twice, IndexError for what is out of range.
    """
    dims = hook.dims if len(hook.dims) == value.ndim else ()
    where, pos_axis = _described(hook, dims, value), position_axis(value, hook)
    if pos_axis is None and positions not in (None, "all"):
        raise ValueError(f"positions={positions!r}, and '{where}' has no axis of positions")
    behind = [axis for axis in range(1, value.ndim) if axis != pos_axis]
    if len(rest) > len(behind):
        raise ValueError(
            f"rest={rest!r} indexes {len(rest)} axes; '{where}' has {len(behind)} behind batch and position"
        )
    head_axis = next((dims.index(name) for name in ("head", "kv_head") if name in dims), None)
    row_axis = 0 if value.ndim and (not dims or dims[0] == "batch") else None
    asked = [("rows", rows, row_axis), ("heads", heads, head_axis), ("features", features, value.ndim - 1)]
    asked += [(f"rest[{i}]", index, axis) for i, (index, axis) in enumerate(zip(rest, behind, strict=False))]
    found: dict[int, Sequence[int]] = {}
    for name, index, axis in asked:
        if index is not None:
            _add(found, name, index, axis, value.shape, where)
    part = Part(where, dims, tuple(value.shape), found)
    if pos_axis is None:
        return [part]
    shown_rows = Shown.at(hook, value.shape[pos_axis])
    return [_along(part, Along(pos_axis, shown, shown.chosen(positions, where))) for shown in shown_rows]


@dataclass(eq=False, repr=False)
class LocalController(Controller):
    """Changes a part of a site's value, and hands on the rest as it is.

    Args (of all that change a part):
        positions: which positions: a number, several, "prompt", "last_prompt" (the last of the prompt), "generated" (tokens
            that generation added) or "all". Negative ones count from the end of the prompt. None: "all".
        heads: which heads (of keys and values: key/value heads). None: all.
        features: which indices of the last axis: neurons, dimensions of the stream.
        rows: which rows of the batch.
        rest: for each axis behind batch and position which indices, or None for all; e.g. `(3,)` is head 3 at `hook_z`, and
            head 3 at `hook_pattern`, where the position is that of the query.

    Raises TypeError for an index that is no whole number, such as a mask; during the run ValueError for an axis that the site
    has not, IndexError for what is out of range.
    """

    positions: Positions = field(default=None, kw_only=True)
    heads: Index = field(default=None, kw_only=True)
    features: Index = field(default=None, kw_only=True)
    rows: Index = field(default=None, kw_only=True)
    rest: Sequence[Index] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.positions, str) and self.positions not in PLACES:
            raise ValueError(f"positions must be numbers or one of {', '.join(PLACES)}, got {self.positions!r}")
        if not isinstance(self.positions, str):
            self.positions = _numbers("positions", self.positions)
        self.heads, self.features, self.rows = (
            _numbers(name, getattr(self, name)) for name in ("heads", "features", "rows")
        )
        self.rest = tuple(_numbers("rest", index) for index in self.rest)

    def parts(self, value: Tensor, hook: HookPoint, positions: Positions = None) -> list[Part]:
        """Which part of this value is changed; `positions` stands for those that were not given."""
        asked = positions if self.positions is None else self.positions
        return parts_of(value, hook, asked, self.heads, self.features, self.rows, self.rest)


@dataclass(eq=False, repr=False)
class PartEditor(LocalController):
    """A local controller that makes the new values of a part from the old ones alone."""

    def change(self, value: Any, hook: HookPoint) -> Any:
        for part in self.parts(value, hook):
            value = part.replaced(value, partial(self.edit, part=part))
        return value

    @abstractmethod
    def edit(self, value: Tensor, part: Part) -> Tensor:
        """The new values of a part, all axes of the site kept; never in place."""


def position_axis(value: Tensor, hook: HookPoint) -> int | None:
    """Where the position stands in a value of a site, if anywhere; in a network whose axes have no names, second of at least
    three."""
    if len(hook.dims) != value.ndim:
        return 1 if value.ndim >= 3 else None
    return next((hook.dims.index(name) for name in ("pos", "query_pos") if name in hook.dims), None)


def listed(asked: Any) -> list[int]:
    """Positions that are asked for by number, or as "last_prompt", as a list."""
    return [-1] if asked == "last_prompt" else [asked] if isinstance(asked, int) else list(asked)


def fitted(given: Tensor, like: Tensor, part: Part, what: str) -> Tensor:
    """Given values as large as a part, in its dtype; raises ValueError, with both shapes, if they do not broadcast."""
    try:
        return given.to(like).expand_as(like)
    except RuntimeError:
        raise ValueError(
            f"{what} has shape {tuple(given.shape)}, which does not broadcast to {tuple(like.shape)}, what is changed at "
            f"'{part.where}'"
        ) from None


def _described(hook: HookPoint, dims: tuple[str, ...], value: Tensor) -> str:
    """A site, with its axes, for messages."""
    axes = [f"{name} {n}" for name, n in zip(dims, value.shape, strict=True)] if dims else map(str, value.shape)
    return f"{hook.name} [{', '.join(axes)}]"


def _along(part: Part, along: Along) -> Part:
    """The part with the columns of its positions, and the row that they are of."""
    indices, shown = dict(part.indices), along.shown
    columns = [position - shown.first for position in along.orders]
    if columns != list(range(shown.n)):
        indices[along.axis] = columns
    if shown.row is not None:
        indices[0] = [row for row in indices.get(0, [shown.row]) if row == shown.row]
    return replace(part, indices=indices, along=along)


def _add(
    found: dict[int, Sequence[int]], name: str, index: Any, axis: int | None, shape: Sequence[int], where: str
) -> None:
    """Add what is asked of one axis to what was found."""
    if axis is None:
        raise ValueError(f"{name}={index!r}, and '{where}' has no such axis")
    if axis in found:
        raise ValueError(f"{name}={index!r}: this axis of '{where}' is asked for twice")
    numbers, n = [index] if isinstance(index, int) else list(index), shape[axis]
    for wrong in (i for i in numbers if not -n <= i < n):
        raise IndexError(f"{name}: {wrong} is out of range at '{where}': the axis has {n}, so {-n} to {n - 1}")
    found[axis] = list(dict.fromkeys(i % n for i in numbers))


def _replaced(value: Tensor, chosen: list[tuple[int, Sequence[int]]], change: Callable[[Tensor], Tensor]) -> Tensor:
    if not chosen:
        return change(value)
    (axis, indices), *others = chosen
    index = _tensor(indices, value)
    return value.index_copy(axis, index, _replaced(value.index_select(axis, index), others, change))


def _tensor(indices: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, dtype=torch.long, device=like.device)


def _numbers(name: str, index: Any) -> int | list[int] | None:
    """An index as JSON can hold it. Raises TypeError for what is no whole number, nor several."""
    given = index.tolist() if hasattr(index, "tolist") else index
    several = given if isinstance(given, Iterable) else [given]
    if given is None:
        return None
    if any(isinstance(one, bool) or not isinstance(one, SupportsIndex) for one in several):
        raise TypeError(f"{name} are whole numbers, got {index!r}; of a mask give mask.nonzero().flatten()")
    return [operator.index(one) for one in several] if isinstance(given, Iterable) else operator.index(given)
