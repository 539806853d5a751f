"""A weight's journey in one line, and its inverse.

A checkpoint and a model hold the same numbers under different names and shapes. A `Row` states one such
correspondence: their name, our name, and an einops pattern from their tensor to ours.

    Row("q_proj.weight", "attn.W_Q", "(n h) m -> n m h")

Three further notations cover what checkpoints do:

- `{l}` in both names stands for a range (layers, experts): `expand(rows, l=12)` writes the rows out.
- A fused tensor has an axis whose parts are different weights of ours. Name the parts, and put the axis in
  our name: `Row("c_attn.weight", "attn.W_{qkv}", "m (qkv n h) -> n m h", qkv="QKV")` is three rows, one for
  each index of `qkv`; `x={"Q": 32, "K": 8, "V": 8}` cuts an axis into consecutive slices of these lengths
  and keeps it.
- `tied="wte.weight"`: files need not hold this tensor, because it is that other one.

Only names, shapes and strides are touched: reading is indexing, splitting, permuting and merging axes, so
what comes out is a view of their tensor wherever torch can make one, and writing goes through the same
view.

Vocabulary of the patterns: n heads, h d_head, m d_model, f d_mlp, v d_vocab, e expert; any identifier will
do.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

Axis = int | Sequence[Any] | Mapping[str, int]  # a size, the labels of its indices, or label -> length
Side = tuple[tuple[str, ...], ...]  # one group of axes for each dimension

_solved: dict[tuple[Any, ...], dict[str, int]] = {}  # sizes that were found, by kind of row and shapes


@dataclass(init=False)
class Row:
    """One weight: `theirs` becomes `ours` by the einops `pattern`, and back.

    Args:
        theirs, ours: names in the checkpoint and in the model, with `{placeholders}` for what `expand`
            enumerates.
        pattern: einops pattern from their shape to ours; None leaves the tensor as it is.
        take: the part of a fused tensor that is ours: axis -> index (the axis goes) or slice (it stays).
        tied: name of the tensor that `theirs` equals. A file without `theirs` is read from there; a file in
            which the two differ is refused; `export` leaves `theirs` out unless told otherwise.
        **axes: sizes of axes, labels of their parts (see the module), or ranges of placeholders. Sizes that
            follow from the two shapes need not be given.

    Raises:
        ValueError: the pattern is malformed, or a name in `take` or `axes` is not in it.

    >>> import torch
    >>> from hooked_lm.weights.rows import Row
    >>> row = Row("c_attn.weight", "attn.W_K", "m (qkv n h) -> n m h", take={"qkv": 1}, qkv=3, h=2)
    >>> fused = torch.arange(8 * 24.0).view(8, 24)
    >>> key = row.read(fused)
    >>> key.shape, torch.equal(key[3], fused[:, 8:16][:, 6:8])
    (torch.Size([4, 8, 2]), True)
    >>> key.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    True
    """

    theirs: str
    ours: str
    pattern: str | None
    take: dict[str, int | slice]
    tied: str | None
    axes: dict[str, Axis]

    def __init__(
        self,
        theirs: str,
        ours: str,
        pattern: str | None = None,
        *,
        take: Mapping[str, int | slice] | None = None,
        tied: str | None = None,
        **axes: Axis,
    ):
        self.theirs, self.ours, self.pattern, self.tied = theirs, ours, pattern, tied
        self.take, self.axes = dict(take or {}), dict(axes)
        self._left, self._right = _parse(pattern) if pattern is not None else ((), ())
        problem = self._problem()
        if problem:
            raise ValueError(f"{self}: {problem}")

    def __str__(self) -> str:
        return f"Row {self.theirs!r} -> {self.ours!r}" + (f" by {self.pattern!r}" if self.pattern else "")

    def _problem(self) -> str | None:
        """What is wrong with the definition, or None."""
        left, right = _flat(self._left), _flat(self._right)
        theirs, ours = placeholders(self.theirs), placeholders(self.ours)
        dropped = {axis for axis, part in self.take.items() if isinstance(part, int)}
        labelled = {axis for axis in left if axis in self.axes and not isinstance(self.axes[axis], int)}
        gone = set(left) - set(right)
        if unknown := set(self.take) - set(left):
            return f"take names {_names(unknown)}, which the left side of the pattern does not have"
        if unknown := set(self.axes) - set(left) - theirs - ours:
            return f"{_names(unknown)} is neither an axis of the pattern nor a placeholder of the names"
        if unknown := set(right) - set(left):
            return f"{_names(unknown)} stands on the right side only"
        if unknown := gone - dropped - ours:
            return f"{_names(unknown)} stands on the left side only: take an index of it, or label its parts"
        if kept := dropped - gone:
            return f"take drops {_names(kept)} by an index, but the right side keeps it"
        if unnamed := labelled - ours:
            return f"{_names(unnamed)} has labels, but {self.ours!r} has no placeholder for it"
        if unknown := ours - theirs - set(left):
            return f"the placeholder {_names(unknown)} of ours is neither in {self.theirs!r} nor an axis"
        if any(isinstance(part, slice) and part.step not in (None, 1) for part in self.take.values()):
            return "a slice in take cannot have a step"
        return None

    def expand(self, ranges: Mapping[str, Axis]) -> Iterator["Row"]:
        """This row for every value of its placeholders; see `expand`."""
        known = {**{k: v for k, v in ranges.items() if k in _flat(self._left)}, **self.axes}
        free = sorted(placeholders(self.theirs) | placeholders(self.ours))
        if missing := [name for name in free if name not in known and name not in ranges]:
            raise ValueError(f"{self}: no range for the placeholder {_names(missing)}")
        values = [list(_labels(known.get(name, ranges.get(name)))) for name in free]
        for labels in product(*values):
            chosen = dict(zip(free, labels, strict=True))
            take = dict(self.take)
            sizes: dict[str, Axis] = {}
            for axis in _flat(self._left):
                if axis in chosen:
                    take[axis], sizes[axis] = _part_of(known[axis], chosen[axis], kept=axis in _flat(self._right))
                elif axis in known:
                    sizes[axis] = known[axis]
            names = {key: str(label) for key, label in chosen.items()}
            tied = self.tied and _fill(self.tied, names)
            yield Row(
                _fill(self.theirs, names),
                _fill(self.ours, names),
                self.pattern,
                take=take,
                tied=tied,
                **sizes,
            )

    def sizes(self, theirs: Sequence[int] | None, ours: Sequence[int] | None) -> dict[str, int]:
        """Axis -> size, as far as the given sizes and the two shapes (either may be None) tell.

        Raises:
            ValueError: the shapes do not fit the pattern or each other.
        """
        shapes = (None if theirs is None else tuple(theirs), None if ours is None else tuple(ours))
        key = (self.kind, *shapes)
        if key not in _solved:
            _solved[key] = self._solve(*shapes)
        return dict(_solved[key])

    @property
    def kind(self) -> str:
        """Rows of one kind take tensors of one shape apart alike: the layers of a model differ in names only."""
        return repr((self.pattern, self.axes, self.take))

    def _solve(self, theirs: Sequence[int] | None, ours: Sequence[int] | None) -> dict[str, int]:
        left, right = self._sides(len(theirs if theirs is not None else ours or ()))
        known = {axis: size for axis, size in self.axes.items() if isinstance(size, int)}
        dims: list[tuple[tuple[str, ...], int, bool]] = []
        for side, shape, is_ours in ((left, theirs, False), (right, ours, True)):
            if shape is not None and len(side) != len(shape):
                raise self._misfit(theirs, ours)
            dims += [(group, size, is_ours) for group, size in zip(side, shape or (), strict=False)]
        for _ in range(len(_flat(left)) + 1):  # a size found in one group may be what another waits for
            for group, size, is_ours in dims:
                self._infer(known, group, size, is_ours)
        for group, size, is_ours in dims:
            extents = [self._extent(axis, known, is_ours) for axis in group]
            if None not in extents and prod(e for e in extents if e is not None) != size:
                raise self._misfit(theirs, ours)
        if theirs is not None and (unknown := set(_flat(left)) - set(known)):
            raise ValueError(f"{self}: the size of {_names(unknown)} is not determined by {list(theirs)}; give it")
        return known

    def their_shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """The shape of their tensor, given ours.

        Raises:
            ValueError: it does not follow from our shape and the sizes given.
        """
        left, _ = self._sides(len(ours))
        known = self.sizes(None, ours)
        if unknown := set(_flat(left)) - set(known):
            raise ValueError(f"{self}: the size of {_names(unknown)} does not follow from {list(ours)}; give it")
        return tuple(prod(known[axis] for axis in group) for group in left)

    def read(self, theirs: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Our tensor out of theirs: a view where torch can make one. `shape`: what ours must be, when known.

        Raises:
            ValueError: their shape does not fit the pattern, the sizes or `shape`.
        """
        sizes = self.sizes(theirs.shape, shape)
        _, right = self._sides(theirs.ndim)
        part = self.part(theirs, sizes)
        extents = dict(zip(_flat(right), part.shape, strict=True))
        return part.reshape([prod(extents[axis] for axis in group) for group in right])

    def write(self, ours: Tensor, theirs: Tensor) -> None:
        """The inverse of `read`: puts our tensor into its region of theirs, in place.

        Raises:
            ValueError: the two shapes do not fit.
        """
        part = self.part(theirs, self.sizes(theirs.shape, ours.shape))
        part.copy_(ours.reshape(part.shape))

    def unread(self, ours: Tensor) -> Tensor:
        """The inverse of `read` for a row that takes all of their tensor: a view where torch can make one."""
        left, right = self._sides(ours.ndim)
        sizes, order = self.sizes(None, ours.shape), _flat(right)
        split = ours.reshape([sizes[axis] for axis in order])
        return split.permute([order.index(axis) for axis in _flat(left)]).reshape(self.their_shape(ours.shape))

    def part(self, theirs: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """Our region of their tensor as a view with one dimension for each axis, in our order."""
        left, right = self._sides(theirs.ndim)
        axes = _flat(left)
        whole = theirs.reshape([sizes[axis] for axis in axes])  # splitting dimensions is always a view
        region = whole[tuple(self.take.get(axis, slice(None)) for axis in axes)]
        kept = [axis for axis in axes if not isinstance(self.take.get(axis), int)]
        return region.permute([kept.index(axis) for axis in _flat(right)])

    def taken_dims(self) -> set[int]:
        """The dimensions of their tensor of which this row takes a part only."""
        return {dim for dim, group in enumerate(self._left) if self.take.keys() & set(group)}

    def split_dims(self, ndim: int) -> Side:
        """The axes of each of the `ndim` dimensions of their tensor."""
        return self._sides(ndim)[0]

    def _sides(self, ndim: int) -> tuple[Side, Side]:
        if self.pattern is not None:
            return self._left, self._right
        same = tuple((f"axis{dim}",) for dim in range(ndim))
        return same, same

    def _extent(self, axis: str, known: Mapping[str, int], is_ours: bool) -> int | None:
        """How long an axis is on one side: on ours, a slice shortens it."""
        size, part = known.get(axis), self.take.get(axis)
        if size is None or part is None:
            return size
        if not 0 <= (part if isinstance(part, int) else part.start or 0) < size or _stop(part, size) > size:
            raise ValueError(f"{self}: take={{{axis!r}: {part}}} lies outside the {size} of the axis")
        return len(range(*part.indices(size))) if is_ours and isinstance(part, slice) else size

    def _infer(self, known: dict[str, int], group: tuple[str, ...], size: int, is_ours: bool) -> None:
        """Enter the size of the one unknown axis of a dimension, if it is the only one."""
        unknown = [axis for axis in group if axis not in known]
        if len(unknown) != 1 or (is_ours and unknown[0] in self.take):
            return
        others = prod(self._extent(axis, known, is_ours) or 0 for axis in group if axis in known)
        if others and size % others == 0:
            known[unknown[0]] = size // others

    def _misfit(self, theirs: Sequence[int] | None, ours: Sequence[int] | None) -> ValueError:
        left, right = self._sides(len(ours or theirs or ()))
        known = {axis: size for axis, size in self.axes.items() if isinstance(size, int)}
        if ours is not None and len(ours) == len(right):
            for group, size in zip(right, ours, strict=True):
                self._infer(known, group, size, is_ours=True)
        expected = [
            str(prod(known[axis] for axis in group)) if set(group) <= set(known) else "*".join(group) for group in left
        ]
        given = "".join(f", {axis}={size}" for axis, size in self.axes.items())
        return ValueError(
            f"{self}{given}: the shapes do not fit: {self.theirs!r} expected [{', '.join(expected)}], "
            f"got {list(theirs) if theirs is not None else 'nothing'}; "
            f"{self.ours!r} is {list(ours) if ours is not None else 'of any shape'}"
        )


def expand(rows: Iterable[Row], **ranges: Axis) -> list[Row]:
    """Write out the placeholders of rows: an int n stands for 0 .. n-1, anything else is iterated.

    What a row says itself goes before `ranges`, so `Row(..., l=[0, 2])` is for two layers only. A range
    that is also an axis of a row's pattern gives its size there.

    Raises:
        ValueError: a placeholder has no range.

    >>> from hooked_lm.weights.rows import Row, expand
    >>> rows = [Row("h.{l}.qkv.bias", "blocks.{l}.b_{qkv}", "(qkv n h) -> n h", qkv="QKV")]
    >>> [(row.theirs, row.ours, row.take) for row in expand(rows, l=12)][-2:]
    [('h.11.qkv.bias', 'blocks.11.b_K', {'qkv': 1}), ('h.11.qkv.bias', 'blocks.11.b_V', {'qkv': 2})]
    """
    return [concrete for row in rows for concrete in row.expand(ranges)]


def unprefixed(rows: Iterable[Row], prefix: str) -> list[Row]:
    """The same rows for a checkpoint whose names lack `prefix` (that of a base model, `"transformer."`)."""
    return [
        Row(
            row.theirs.removeprefix(prefix),
            row.ours,
            row.pattern,
            take=row.take,
            tied=row.tied and row.tied.removeprefix(prefix),
            **row.axes,
        )
        for row in rows
    ]


def check_coverage(rows: Sequence[Row], our_shapes: Sequence[Sequence[int]], their_shape: Sequence[int]) -> None:
    """That the rows which share one tensor of theirs take every element of it, each once.

    Raises:
        ValueError: an element is taken twice, or never.
    """
    partial = set().union(*(row.taken_dims() for row in rows))
    if len(rows) == 1 and not partial:
        return
    # Dimensions that every row takes whole are shrunk to one element: the mask stays small.
    taken = torch.zeros([size if dim in partial else 1 for dim, size in enumerate(their_shape)], dtype=torch.bool)
    for row, shape in zip(rows, our_shapes, strict=True):
        sizes = row.sizes(their_shape, shape)
        whole = {axis for dim, g in enumerate(row.split_dims(len(their_shape))) if dim not in partial for axis in g}
        part = row.part(taken, {axis: 1 if axis in whole else size for axis, size in sizes.items()})
        if part.any():
            raise ValueError(f"{row}: takes elements of {row.theirs!r} that another row takes too")
        part.fill_(True)
    if not taken.all():
        share = 1 - taken.float().mean().item()
        fillers = _names(row.ours for row in rows)
        raise ValueError(f"{share:.0%} of {rows[0].theirs!r} {list(their_shape)} is taken by no row: only {fillers}")


def placeholders(name: str) -> set[str]:
    """The `{placeholders}` of a name."""
    return set(re.findall(r"\{(\w+)\}", name))


@lru_cache
def _parse(pattern: str) -> tuple[Side, Side]:
    sides = pattern.split("->")
    if len(sides) != 2:
        raise ValueError(f"pattern {pattern!r}: expected one '->' between their axes and ours")
    return _parse_side(sides[0], pattern), _parse_side(sides[1], pattern)


def _parse_side(text: str, pattern: str) -> Side:
    groups: list[tuple[str, ...]] = []
    is_open = False
    for token in re.findall(r"[()]|[^\s()]+", text):
        if token == "(" and not is_open:
            groups.append(())
            is_open = True
        elif token == ")" and is_open:
            is_open = False
        elif token == "1":
            groups += [] if is_open else [()]  # a dimension of one element has no axis
        elif token.isidentifier() and is_open:
            groups[-1] += (token,)
        elif token.isidentifier():
            groups.append((token,))
        else:
            raise ValueError(f"pattern {pattern!r}: unexpected {token!r}; axes are names, 1, or (names)")
    axes = _flat(tuple(groups))
    if is_open or len(set(axes)) != len(axes):
        raise ValueError(f"pattern {pattern!r}: " + ("a '(' is not closed" if is_open else "an axis stands twice"))
    return tuple(groups)


def _flat(side: Side) -> tuple[str, ...]:
    return tuple(axis for group in side for axis in group)


def _labels(axis: Axis | None) -> Iterable[Any]:
    return range(axis) if isinstance(axis, int) else axis or ()


def _part_of(axis: Axis, label: Any, kept: bool) -> tuple[int | slice, int]:
    """Where a labelled part lies in its axis, and how long the axis is."""
    if isinstance(axis, Mapping):
        start = 0
        for name, length in axis.items():
            if name == label:
                return slice(start, start + length), sum(axis.values())
            start += length
    labels = list(_labels(axis))
    index = labels.index(label)
    return slice(index, index + 1) if kept else index, len(labels)


def _stop(part: int | slice, size: int) -> int:
    return part + 1 if isinstance(part, int) else size if part.stop is None else part.stop


def _fill(name: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: labels[match[1]], name)


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
