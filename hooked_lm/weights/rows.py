"""Rows: one line for each weight of a checkpoint says which parameter of the model it is, and in which shape.

A checkpoint and a model hold the same numbers under different names and shapes. A `Row` states one such
correspondence: the name in the checkpoint, the name in the model, and an einops pattern from the one shape to the other.

    Row("q_proj.weight", "attn.W_Q", "(n h) m -> n m h")

The inverse is derived from the same line. Throughout, *source* is the checkpoint's side and *target* the model's.
Three further notations:

- `{l}` in both names stands for a range (layers, experts): `expand(rows, l=12)` writes one row for each layer.
- A fused tensor has an axis whose parts are different parameters. Label the parts, and put the axis in
  the target name: `Row("c_attn.weight", "attn.W_{qkv}", "m (qkv n h) -> n m h", qkv="QKV")` is three rows, one for
  each index of `qkv`. `x={"Q": 32, "K": 8, "V": 8}` cuts an axis into consecutive slices of these lengths
  and keeps it.
- `tied="wte.weight"`: the tensor equals that other tensor, and files may leave it out.

Loading rearranges and never computes, so a parameter is a view of the checkpoint's tensor wherever torch can make one
(see `rearrangement.py`).

Axes in the patterns: n heads, h d_head, m d_model, f d_mlp, v d_vocab, e expert. Any name that einops accepts will do.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hooked_lm.weights.rearrangement import Rearrangement, flat, quoted

Axis = int | Sequence[Any] | Mapping[str, int]  # a size, the labels of its indices, or label -> length

_rearrangement = lru_cache(maxsize=1024)(Rearrangement)  # the layers of a model share their patterns


@dataclass(init=False)
class Row:
    """One weight: the einops `pattern` turns the checkpoint's tensor `source` into the parameter `target`, and back.

    Args:
        source, target: names in the checkpoint and in the model, with `{placeholders}` for what `expand`
            enumerates.
        pattern: einops pattern from the source's shape to the target's; None if the shapes are equal.
        take: the part of a fused tensor that is the target: axis -> index (the axis is dropped) or slice (it is kept).
        tied: name of the tensor that `source` equals. If a file lacks `source`, that tensor is read. A file in which
            the two differ is refused. `export` leaves `source` out by default.
        partial: no parameter holds the rest of the tensor. It is not read, and the tensor cannot be exported.
        **axes: sizes of axes, labels of their parts (see the module), or ranges of placeholders. Sizes that
            follow from the shapes can be omitted.

    Raises:
        ValueError: the pattern is malformed, or a name in `take` or `axes` is not in it.

    >>> import torch
    >>> from hooked_lm.weights.rows import Row
    >>> row = Row(
    ...     "c_attn.weight", "attn.W_K", "m (qkv n h) -> n m h", take={"qkv": 1}, qkv=3, h=2
    ... )
    >>> fused = torch.arange(8 * 24.0).view(8, 24)
    >>> key = row.to_target(fused)
    >>> key.shape, torch.equal(key[3], fused[:, 8:16][:, 6:8])
    (torch.Size([4, 8, 2]), True)
    >>> key.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    True
    """

    source: str
    target: str
    pattern: str | None
    take: dict[str, int | slice]
    tied: str | None
    partial: bool
    axes: dict[str, Axis]

    def __init__(
        self,
        source: str,
        target: str,
        pattern: str | None = None,
        *,
        take: Mapping[str, int | slice] | None = None,
        tied: str | None = None,
        partial: bool = False,
        **axes: Axis,
    ):
        self.source, self.target, self.pattern, self.tied, self.partial = source, target, pattern, tied, partial
        self.take, self.axes = dict(take or {}), dict(axes)
        self._parts: tuple[tuple[str, int, int], ...] = ()
        self._given: tuple[tuple[str, int], ...] = ()
        how = self.rearrangement(0)
        self._left, self._right = flat(how.left), flat(how.right)
        if problem := self._problem():
            raise ValueError(f"{self}: {problem}")
        self._parts = tuple((axis, *_bounds(part)) for axis, part in self.take.items())
        self._given = tuple(
            (axis, size) for axis, size in self.axes.items() if isinstance(size, int) and axis in self._left
        )

    def __str__(self) -> str:
        return f"Row {self.source!r} -> {self.target!r}" + (f" by {self.pattern!r}" if self.pattern else "")

    def _problem(self) -> str | None:
        """What is wrong with the definition, or None."""
        left, right = self._left, self._right
        source, target = placeholders(self.source), placeholders(self.target)
        dropped = {axis for axis, part in self.take.items() if isinstance(part, int)}
        labelled = {axis for axis in left if axis in self.axes and not isinstance(self.axes[axis], int)}
        gone = set(left) - set(right)
        if unknown := set(self.take) - set(left):
            return f"take names {quoted(unknown)}, which the left side of the pattern does not have"
        if unknown := set(self.axes) - set(left) - source - target:
            return f"{quoted(unknown)} is neither an axis of the pattern nor a placeholder of the names"
        if unknown := set(right) - set(left):
            return f"{quoted(unknown)} is on the right side only"
        if unknown := gone - dropped - target:
            return f"{quoted(unknown)} is on the left side only: take an index of it, or label its parts"
        if kept := dropped - gone:
            return f"take drops {quoted(kept)} by an index, but the right side keeps it"
        if unnamed := labelled - target:
            return f"{quoted(unnamed)} has labels, but {self.target!r} has no placeholder for it"
        if unknown := target - source - set(left):
            return f"the placeholder {quoted(unknown)} of the target is neither in {self.source!r} nor an axis"
        slices = [part for part in self.take.values() if isinstance(part, slice)]
        if any(part.start is None or part.stop is None or part.step not in (None, 1) for part in slices):
            return "a slice in take has a start, a stop and no step"
        return None

    def expand(self, ranges: Mapping[str, Axis]) -> Iterator["Row"]:
        """This row for every value of its placeholders; see `expand`."""
        known = {**{k: v for k, v in ranges.items() if k in self._left}, **self.axes}
        free = sorted(placeholders(self.source) | placeholders(self.target))
        if missing := [name for name in free if name not in known and name not in ranges]:
            raise ValueError(f"{self}: no range for the placeholder {quoted(missing)}")
        values = [list(_labels(known.get(name, ranges.get(name)))) for name in free]
        for labels in product(*values):
            chosen = dict(zip(free, labels, strict=True))
            take = dict(self.take)
            sizes: dict[str, Axis] = {}
            for axis in self._left:
                if axis in chosen:
                    take[axis], sizes[axis] = _part_of(known[axis], chosen[axis], kept=axis in self._right)
                elif axis in known:
                    sizes[axis] = known[axis]
            names = {key: str(label) for key, label in chosen.items()}
            tied = self.tied and _fill(self.tied, names)
            yield Row(
                _fill(self.source, names),
                _fill(self.target, names),
                self.pattern,
                take=take,
                tied=tied,
                partial=self.partial,
                **sizes,
            )

    def between(self, source: str, target: str, tied: str | None) -> "Row":
        """The same row between other names."""
        row = copy.copy(self)
        row.source, row.target, row.tied = source, target, tied
        return row

    def rearrangement(self, n_dims: int) -> Rearrangement:
        """The rearrangement that the row does; rows that differ only in their names share it."""
        unchanged = " ".join(f"dim{dim}" for dim in range(n_dims))
        return _rearrangement(self.pattern or f"{unchanged} -> {unchanged}", self._parts, self._given)

    def sizes(self, source: Sequence[int] | None, target: Sequence[int] | None = None) -> dict[str, int]:
        """Axis -> size in the checkpoint's tensor, from the sizes given and the shapes (one of them may be None).

        Raises:
            ValueError: the shapes do not fit the pattern or each other, or a size does not follow from them.
        """
        n_dims = len((source if target is None else target) or ())
        try:
            return self.rearrangement(n_dims).sizes(source, target)
        except ValueError as error:
            given = "".join(f", {axis}={size}" for axis, size in self.axes.items())
            raise ValueError(f"{self}{given}: {error}") from None

    def source_shape(self, target: Sequence[int]) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor, given that of the parameter.

        Raises:
            ValueError: it does not follow from that shape and the sizes given.
        """
        return self.rearrangement(len(target)).source_shape(self.sizes(None, target))

    def to_target(self, source: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """The parameter, of shape `shape` if given, from the checkpoint's tensor: a view where torch can make one.

        Raises:
            ValueError: the tensor's shape does not fit the pattern, the sizes or `shape`.
        """
        return self.rearrangement(source.ndim).to_target(source, self.sizes(source.shape, shape))

    def to_source(self, target: Tensor) -> Tensor:
        """The checkpoint's tensor from the parameter, if the row takes all of it: a view where torch can make one."""
        return self.rearrangement(target.ndim).from_target(target, self.sizes(None, target.shape))

    def write(self, target: Tensor, source: Tensor) -> None:
        """Copies the parameter into its place in the checkpoint's tensor.

        Raises:
            ValueError: the two shapes do not fit.
        """
        how, sizes = self.rearrangement(target.ndim), self.sizes(source.shape, target.shape)
        how.part(source, sizes).copy_(how.from_target(target, sizes))

    @property
    def partial_dims(self) -> set[int]:
        """The dimensions of the checkpoint's tensor of which this row takes a part only."""
        return self.rearrangement(0).partial_dims


def expand(rows: Iterable[Row], **ranges: Axis) -> list[Row]:
    """One row for each value of the placeholders: an int n stands for 0 .. n-1, other ranges are iterated.

    A row's own range takes precedence over `ranges`, so `Row(..., l=[0, 2])` is for two layers only. A range of a
    placeholder that is also an axis of the pattern gives the size of the axis.

    Raises:
        ValueError: a placeholder has no range.

    >>> from hooked_lm.weights.rows import Row, expand
    >>> rows = [Row("h.{l}.qkv.bias", "blocks.{l}.b_{qkv}", "(qkv n h) -> n h", qkv="QKV")]
    >>> [(row.source, row.target, row.take) for row in expand(rows, l=12)][-2:]
    [('h.11.qkv.bias', 'blocks.11.b_K', {'qkv': 1}), ('h.11.qkv.bias', 'blocks.11.b_V', {'qkv': 2})]
    """
    return [concrete for row in rows for concrete in row.expand(ranges)]


def unprefixed(rows: Iterable[Row], prefix: str) -> list[Row]:
    """The rows for a checkpoint whose names lack `prefix`, such as `"transformer."` in that of a base model."""
    return [
        row.between(row.source.removeprefix(prefix), row.target, row.tied and row.tied.removeprefix(prefix))
        for row in rows
    ]


def check_coverage(rows: Sequence[Row], target_shapes: Sequence[Sequence[int]], source_shape: Sequence[int]) -> None:
    """Checks that the rows of one tensor take every element of it exactly once.

    Raises:
        ValueError: an element is taken twice, or by no row.
    """
    partial = set().union(*(row.partial_dims for row in rows))
    if len(rows) == 1 and not partial:
        return
    # Dimensions of which no row takes a part have one element in the mask, so it stays small.
    taken = torch.zeros([size if dim in partial else 1 for dim, size in enumerate(source_shape)], dtype=torch.bool)
    for row, shape in zip(rows, target_shapes, strict=True):
        how, sizes = row.rearrangement(len(source_shape)), row.sizes(source_shape, shape)
        shrunk = {axis for dim, group in enumerate(how.left) if dim not in partial for axis in group}
        part = how.part(taken, {axis: 1 if axis in shrunk else size for axis, size in sizes.items()})
        if part.any():
            raise ValueError(f"{row}: takes elements of {row.source!r} that another row takes too")
        part.fill_(True)
    if not taken.all():
        share = 1 - taken.float().mean().item()
        fillers = quoted(row.target for row in rows)
        raise ValueError(f"{share:.0%} of {rows[0].source!r} {list(source_shape)} is taken by no row: only {fillers}")


def placeholders(name: str) -> set[str]:
    """The `{placeholders}` of a name."""
    return set(re.findall(r"\{(\w+)\}", name))


def _labels(axis: Axis | None) -> Iterable[Any]:
    return range(axis) if isinstance(axis, int) else axis or ()


def _part_of(axis: Axis, label: object, kept: bool) -> tuple[int | slice, int]:
    """The index or slice of a labelled part in its axis, and the size of the axis."""
    if isinstance(axis, Mapping):
        start = 0
        for name, length in axis.items():
            if name == label:
                return slice(start, start + length), sum(axis.values())
            start += length
    labels = list(_labels(axis))
    index = labels.index(label)
    return slice(index, index + 1) if kept else index, len(labels)


def _bounds(part: int | slice) -> tuple[int, int]:
    return (part, part + 1) if isinstance(part, int) else (part.start, part.stop)


def _fill(name: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: labels[match[1]], name)
