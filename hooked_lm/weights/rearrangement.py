"""An einops pattern from one shape to another, in both directions, for a whole tensor or for a part of one.

einops parses the pattern and rearranges the tensors. Four things that checkpoints need and einops lacks are
added here:

- A part of a tensor. The axes of which a part is taken move to the front, where they are sliced; a second pattern
  arranges the slice, and writes `1` for an axis of which one index is taken.
- The inverse. The pattern with its sides exchanged.
- Sizes that follow from the shape of the result. einops infers sizes from its input alone.
- Shapes without tensors. They are checked on the meta device, before anything is read.

A result is a view of the input wherever torch can make one: splitting, slicing and permuting always are views, merging
axes is one if they are adjacent in memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from einops import EinopsError, rearrange
from einops.parsing import ParsedExpression
from torch import Tensor

Side = list[list[str]]  # the axes of each dimension


@dataclass(frozen=True)
class Rearrangement:
    """From a tensor of a checkpoint (the left side), or from a part of it, to a parameter (the right side), and back.

    Args:
        pattern: axes in groups on both sides. The right side lacks the axes of which one index is taken.
        take: (axis, start, stop) for each axis of which a part is taken.
        given: (axis, size) on the left side, for sizes that do not follow from the shapes.

    Raises:
        ValueError: the pattern is malformed.

    >>> import torch
    >>> from hooked_lm.weights.rearrangement import Rearrangement
    >>> keys = Rearrangement(
    ...     "m (qkv n h) -> n m h", take=(("qkv", 1, 2),), given=(("qkv", 3), ("h", 2))
    ... )
    >>> keys.to_target(torch.zeros(8, 24), keys.sizes((8, 24))).shape
    torch.Size([4, 8, 2])
    """

    pattern: str
    take: tuple[tuple[str, int, int], ...] = ()
    given: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        _ = self.left, self.right  # a malformed pattern is refused here

    @cached_property
    def left(self) -> Side:
        return _parse(self.pattern, 0)

    @cached_property
    def right(self) -> Side:
        return _parse(self.pattern, 1)

    @cached_property
    def split(self) -> str:
        """The pattern from the left side to one dimension for each axis, the taken ones first."""
        taken = [axis for axis, _, _ in self.take]
        others = [axis for axis in flat(self.left) if axis not in taken]
        return f"{self.pattern.split('->')[0]} -> {' '.join(taken + others)}"

    @cached_property
    def arrange(self) -> tuple[str, str]:
        """The pattern from the part that is taken to the right side, and its inverse."""
        left, right = self.pattern.split("->")
        if self.take:
            kept = flat(self.right)
            left = " ".join(axis if axis in kept else "1" for axis in self.split.split("->")[1].split())
        return f"{left} -> {right}", f"{right} -> {left}"

    @property
    def partial_dims(self) -> set[int]:
        """The dimensions of the left side of which a part is taken."""
        taken = {axis for axis, _, _ in self.take}
        return {dim for dim, group in enumerate(self.left) if taken & set(group)}

    def sizes(self, source: Sequence[int] | None, target: Sequence[int] | None = None) -> dict[str, int]:
        """Axis -> its size in a checkpoint's tensor of shape `source` (None: derived from `target`).

        Raises:
            ValueError: the shapes do not fit the pattern, the sizes or each other, or leave a size open.
        """
        return dict(_sizes(self, None if source is None else tuple(source), None if target is None else tuple(target)))

    def source_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape of the left side."""
        return _merged(self.left, sizes)

    def part(self, source: Tensor, sizes: dict[str, int]) -> Tensor:
        """The part of a checkpoint's tensor that is taken, a view: the whole tensor, or one dimension for each axis."""
        if not self.take:
            return source
        return rearrange(source, self.split, **sizes)[tuple(slice(start, stop) for _, start, stop in self.take)]

    def to_target(self, source: Tensor, sizes: dict[str, int]) -> Tensor:
        """The part of a checkpoint's tensor that is taken, in the shape of the right side."""
        return rearrange(self.part(source, sizes), self.arrange[0], **self.target_sizes(sizes))

    def from_target(self, target: Tensor, sizes: dict[str, int]) -> Tensor:
        """The inverse of `to_target`: a parameter in the shape of `part`."""
        return rearrange(target, self.arrange[1], **self.target_sizes(sizes))

    def target_sizes(self, sizes: dict[str, int]) -> dict[str, int]:
        """Axis -> its size in a parameter, where a slice is shorter than the axis."""
        slices = {axis: stop - start for axis, start, stop in self.take}
        return {axis: size for axis, size in {**sizes, **slices}.items() if axis in flat(self.right)}

    def expected(self, target: Sequence[int] | None) -> str:
        """The known part of the shape of the left side, for messages."""
        known = dict(self.given)
        if target is not None and len(target) == len(self.right):
            known = {**self._sizes_of_single_axes(target), **known}
        dims = [
            str(prod(known[a] for a in group)) if known.keys() >= {*group} else "*".join(group) for group in self.left
        ]
        return f"[{', '.join(dims)}]"

    def _sizes_of_single_axes(self, target: Sequence[int]) -> dict[str, int]:
        """The sizes that the shape of the right side gives directly; a slice does not give the length of its axis."""
        taken = {axis for axis, _, _ in self.take}
        return {g[0]: size for g, size in zip(self.right, target, strict=True) if len(g) == 1 and g[0] not in taken}


def flat(side: Side) -> list[str]:
    """The axes of all dimensions, in order."""
    return [axis for group in side for axis in group]


@lru_cache(maxsize=4096)  # the layers of a model have the same shapes
def _sizes(how: Rearrangement, source: tuple[int, ...] | None, target: tuple[int, ...] | None) -> dict[str, int]:
    misfit = ValueError(
        f"the shapes do not fit: expected {how.expected(target)}, got {'nothing' if source is None else list(source)}; "
        f"the parameter is {'of any shape' if target is None else list(target)}"
    )
    for side, shape in ((how.left, source), (how.right, target)):
        if shape is not None and len(shape) != len(side):
            raise misfit
    known = {**({} if target is None else how._sizes_of_single_axes(target)), **dict(how.given)}
    try:
        if source is not None:
            known |= _axis_sizes(how.left, source, known)
        elif target is not None:
            taken = {axis for axis, _, _ in how.take}
            found = _axis_sizes(how.right, target, how.target_sizes(known))
            known |= {axis: size for axis, size in found.items() if axis not in taken}
    except (EinopsError, ZeroDivisionError):  # the latter for a dimension of size 0
        raise misfit from None
    if unknown := [axis for axis in flat(how.left) if axis not in known]:
        raise ValueError(f"the size of {quoted(unknown)} does not follow from {list(source or target or ())}; give it")
    for axis, start, stop in how.take:
        if not 0 <= start < stop <= known[axis]:
            raise ValueError(f"the part {start}:{stop} of {axis!r} lies outside the {known[axis]} of the axis")
    if target is not None and _merged(how.right, how.target_sizes(known)) != target:
        raise misfit
    return known


def _axis_sizes(side: Side, shape: tuple[int, ...], known: dict[str, int]) -> dict[str, int]:
    """Axis -> size, inferred by einops; without the axes of a dimension in which two or more are unknown."""
    solvable = [len([axis for axis in group if axis not in known]) < 2 for group in side]
    groups = [group for group, is_solvable in zip(side, solvable, strict=True) if is_solvable]
    sizes = [size for size, is_solvable in zip(shape, solvable, strict=True) if is_solvable]
    axes = flat(groups)
    pattern = " ".join(f"({' '.join(group)})" for group in groups) + " -> " + " ".join(axes)
    split = rearrange(
        torch.empty(sizes, device="meta"), pattern, **{axis: known[axis] for axis in axes if axis in known}
    )
    return dict(zip(axes, split.shape, strict=True))


def _merged(side: Side, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(prod(sizes[axis] for axis in group) for group in side)


def _parse(pattern: str, side: int) -> Side:
    sides = pattern.split("->")
    if len(sides) != 2:
        raise ValueError(
            f"pattern {pattern!r}: expected one '->' between the axes of the checkpoint and of the parameter"
        )
    try:
        parsed = ParsedExpression(sides[side])
    except EinopsError as error:
        raise ValueError(f"pattern {pattern!r}: {error}") from None
    if parsed.has_ellipsis or parsed.has_non_unitary_anonymous_axes:
        raise ValueError(f"pattern {pattern!r}: axes are names, 1, or (names), not numbers or '...'")
    return [list(group) for group in parsed.composition]


def quoted(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(repr(name) for name in sorted(names))
