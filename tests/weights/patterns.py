"""Random einops patterns, with tensors and rows for them."""

import re
from math import prod

import einops
import torch
from hypothesis import strategies as st

from hooked_lm.weights.rows import Row, expand


def grouped(draw, axes):
    """A side of a pattern: the axes in random groups, sometimes with a dimension of one element."""
    groups, rest = [], list(axes)
    while rest:
        size = draw(st.integers(1, len(rest)))
        group, rest = rest[:size], rest[size:]
        groups.append(" ".join(group) if len(group) == 1 else f"({' '.join(group)})")
    if draw(st.booleans()):
        groups.insert(draw(st.integers(0, len(groups))), "1")
    return " ".join(groups)


@st.composite
def mappings(draw):
    """A pattern over random axes with its sizes, and labels for one axis that is cut into parts (or None)."""
    axes = "abcd"[: draw(st.integers(1, 4))]
    sizes = {axis: draw(st.integers(1, 4)) for axis in axes}
    left = grouped(draw, draw(st.permutations(axes)))
    cut = draw(st.sampled_from([None, *axes]))
    drops = draw(st.booleans())
    labels = None
    kept = list(axes)
    if cut and drops:
        labels = [f"p{i}" for i in range(sizes[cut])]
        kept.remove(cut)
    elif cut:
        labels = {f"p{i}": draw(st.integers(1, 3)) for i in range(draw(st.integers(1, 3)))}
        sizes[cut] = sum(labels.values())
    right = grouped(draw, draw(st.permutations(kept)))
    return left, right, sizes, cut, labels


def source_tensor(left, sizes):
    """Different numbers, so that the position of each element can be checked."""
    elements = prod(sizes.values())
    names = [axis for axis in left if axis in sizes]
    flat = torch.arange(elements).view([sizes[axis] for axis in names])
    return einops.rearrange(flat, f"{' '.join(names)} -> {left}", **sizes), names, flat


def row_of(left, right, sizes, cut, labels):
    axes = {**sizes, cut: labels} if cut else sizes
    return expand([Row("w", f"target_{{{cut}}}" if cut else "target", f"{left} -> {right}", **axes)])


def target_parts(right, sizes, cut, labels):
    """For each row the groups of its parameter, and the size in it of each axis."""
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", right)]
    groups = [[axis for axis in group if axis != "1"] for group in groups]
    lengths = [None] if cut is None else labels.values() if isinstance(labels, dict) else [1] * len(labels)
    return [(groups, sizes if length is None else {**sizes, cut: length}) for length in lengths]
