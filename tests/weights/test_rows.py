"""Rows: what a pattern does to a tensor, its inverse, and the errors of wrong rows."""

import re
from itertools import pairwise
from math import prod

import einops
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from hooked_lm.weights import export, load
from hooked_lm.weights.rows import Row, check_coverage, expand, unprefixed


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


@given(mappings())
@settings(deadline=None, max_examples=200)
def test_reading_is_einops_on_the_part(mapping):
    left, right, sizes, cut, labels = mapping
    source, names, flat = source_tensor(left, sizes)
    start = 0
    for index, row in enumerate(row_of(*mapping)):
        if isinstance(labels, dict):
            length = list(labels.values())[index]
            part, start = flat.narrow(names.index(cut), start, length), start + length
            left_axes, extents = names, {**sizes, cut: length}
        elif cut:
            part = flat.select(names.index(cut), index)
            left_axes = [a for a in names if a != cut]
            extents = {a: n for a, n in sizes.items() if a != cut}
        else:
            part, left_axes, extents = flat, names, sizes
        if not left_axes:  # einops needs an axis on the left
            expected = part.reshape([1] * len(right.split()))
        else:
            expected = einops.rearrange(part, f"{' '.join(left_axes)} -> {right}", **extents)
        assert torch.equal(row.to_target(source), expected)


@given(mappings(), st.randoms())
@settings(deadline=None, max_examples=200)
def test_writing_all_parts_in_any_order_restores_the_tensor(mapping, random):
    source, _, _ = source_tensor(mapping[0], mapping[2])
    rows = row_of(*mapping)
    parts = [row.to_target(source).clone() for row in rows]
    check_coverage(rows, [part.shape for part in parts], source.shape)
    back = torch.full_like(source, -1)
    for row, part in random.sample(list(zip(rows, parts, strict=True)), len(rows)):
        assert row.source_shape(part.shape) == source.shape
        row.write(part, back)
    assert torch.equal(back, source)
    if mapping[3] is None:
        assert torch.equal(rows[0].to_source(parts[0]), source)


@given(mappings(), st.data())
@settings(deadline=None, max_examples=100)
def test_a_part_that_no_row_or_two_rows_take_is_refused(mapping, data):
    rows = row_of(*mapping)
    assume(mapping[3] is not None)
    source, _, _ = source_tensor(mapping[0], mapping[2])
    shapes = [row.to_target(source).shape for row in rows]
    chosen = data.draw(st.integers(0, len(rows) - 1))
    with pytest.raises(ValueError, match="another row takes too"):
        check_coverage([*rows, rows[chosen]], [*shapes, shapes[chosen]], source.shape)
    if len(rows) > 1:
        del rows[chosen], shapes[chosen]
        with pytest.raises(ValueError, match="taken by no row"):
            check_coverage(rows, shapes, source.shape)


def target_parts(right, sizes, cut, labels):
    """For each row the groups of its parameter, and the size in it of each axis."""
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", right)]
    groups = [[axis for axis in group if axis != "1"] for group in groups]
    lengths = [None] if cut is None else labels.values() if isinstance(labels, dict) else [1] * len(labels)
    return [(groups, sizes if length is None else {**sizes, cut: length}) for length in lengths]


def is_mergeable(group, extents, strides):
    """Whether the axes of a dimension are adjacent in memory; where an axis of one element lies does not matter."""
    axes = [axis for axis in group if extents[axis] > 1]
    return all(strides[a] == strides[b] * extents[b] for a, b in pairwise(axes))


@given(mappings(), st.randoms())
@settings(deadline=None, max_examples=200)
def test_load_then_export_is_the_identity_and_loading_copies_only_what_cannot_be_a_view(mapping, random):
    left, right, sizes, cut, labels = mapping
    source, names, _ = source_tensor(left, sizes)
    layout = random.sample(range(source.ndim), source.ndim)  # the order of the dimensions in memory
    source = source.double().permute(layout).contiguous().permute([layout.index(dim) for dim in range(source.ndim)])
    strides = dict(zip(names, source.view([sizes[axis] for axis in names]).stride(), strict=True))
    rows, parts = row_of(*mapping), target_parts(right, sizes, cut, labels)
    model = nn.Module()
    for row, (groups, extents) in zip(rows, parts, strict=True):
        shape = [prod(extents[axis] for axis in group) for group in groups]
        model.register_parameter(row.target, nn.Parameter(torch.empty(shape, device="meta")))
    load(model, {"w": source}, rows)
    for row, (groups, extents) in zip(rows, parts, strict=True):
        parameter = model.get_parameter(row.target)
        shares_memory = parameter.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        assert shares_memory == all(is_mergeable(group, extents, strides) for group in groups)
    back = export(model, rows)["w"]
    assert torch.equal(back, source)
    if cut is None and shares_memory:
        assert back.data_ptr() == source.data_ptr()


def test_another_way_back_is_not_the_identity_and_merging_distant_axes_copies():
    source, model = torch.arange(72.0).view(12, 6), nn.Linear(4, 18, bias=False)
    load(model, {"w": source}, [Row("w", "weight", "(n h) m -> (n m) h", n=3)])
    assert model.weight.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    assert torch.equal(export(model, [Row("w", "weight", "(n h) m -> (n m) h", n=3)])["w"], source)
    assert not torch.equal(export(model, [Row("w", "weight", "(h n) m -> (n m) h", n=3)])["w"], source)


def test_a_wrong_permutation_gives_another_tensor():
    square = torch.arange(16 * 16.0).view(16, 16)
    right = Row("w", "W", "(n h) m -> n m h", n=4).to_target(square)
    heads_inside = Row("w", "W", "(h n) m -> n m h", n=4).to_target(square)
    fused = torch.arange(6 * 12.0).view(6, 12)
    gpt2 = Row("w", "W", "m (qkv n h) -> n m h", take={"qkv": 0}, qkv=3, n=2).to_target(fused)
    neox = Row("w", "W", "m (n qkv h) -> n m h", take={"qkv": 0}, qkv=3, n=2).to_target(fused)
    assert right.shape == heads_inside.shape
    assert not torch.equal(right, heads_inside)
    assert gpt2.shape == neox.shape
    assert not torch.equal(gpt2, neox)


@pytest.mark.parametrize(
    ("pattern", "shape", "axes"),
    [
        ("(n h) m -> n m h", (12, 6), {"n": 3}),
        ("m (qkv n h) -> n m h", (6, 24), {"qkv": 3, "n": 2, "take": {"qkv": 1}}),
        ("(n qkv h) m -> n m h", (24, 6), {"qkv": 3, "n": 2, "take": {"qkv": 2}}),
        ("(x h) m -> x m h", (20, 6), {"x": 5, "take": {"x": slice(3, 5)}}),
        ("(part f) m -> m f", (20, 6), {"part": 2, "take": {"part": 1}}),
        ("m (n h) -> n h m", (6, 12), {"n": 3}),
        (None, (4, 5, 6), {}),
    ],
)
def test_the_usual_weights_are_views(pattern, shape, axes):
    source = torch.randn(shape)
    target = Row("w", "W", pattern, **axes).to_target(source)
    target.fill_(7.0)
    assert (source == 7.0).sum() == target.numel()
    assert 0 <= target.data_ptr() - source.data_ptr() < source.nbytes


def test_a_query_weight_is_multiplied_without_a_copy():
    W_Q = Row("q", "W_Q", "(n h) m -> n m h").to_target(torch.randn(12, 6), (3, 6, 4))
    assert W_Q.shape == (3, 6, 4)
    assert W_Q.transpose(1, 2).flatten(0, 1).data_ptr() == W_Q.data_ptr()


def test_expand_makes_a_row_for_each_placeholder_and_part():
    rows = [
        Row("h.{l}.c_attn.bias", "blocks.{l}.attn.b_{qkv}", "(qkv n h) -> n h", qkv="QKV"),
        Row("h.{l}.qkv.weight", "blocks.{l}.W_{x}", "(x h) m -> x m h", x={"Q": 4, "K": 1, "V": 1}, l=[1]),
        Row("h.{l}.w{e}", "blocks.{l}.experts.{e}.W", e=2),
        Row("h.{l}.packed", "blocks.{l}.experts.{e}.W_{part}", "e m (f part) -> m f", part=("gate", "in")),
        Row("lm_head", "W_U", "v m -> m v", tied="wte"),
    ]
    out = expand(rows, l=2, e=2)
    names = [(row.source, row.target) for row in out]
    assert names[:3] == [("h.0.c_attn.bias", f"blocks.0.attn.b_{x}") for x in "QKV"]
    assert [(r.target, r.take) for r in out if "qkv.weight" in r.source] == [
        ("blocks.1.W_Q", {"x": slice(0, 4)}),
        ("blocks.1.W_K", {"x": slice(4, 5)}),
        ("blocks.1.W_V", {"x": slice(5, 6)}),
    ]
    assert ("h.1.w0", "blocks.1.experts.0.W") in names
    packed = [r for r in out if r.target == "blocks.0.experts.1.W_in"]
    assert len(packed) == 1
    assert packed[0].take == {"e": 1, "part": 1}
    assert packed[0].axes == {"e": 2, "part": 2}
    assert len(out) == 6 + 3 + 4 + 8 + 1
    assert len({row.target for row in out}) == len(out)
    with pytest.raises(ValueError, match="no range for the placeholder 'l'"):
        expand(rows)


def test_unprefixed_strips_the_names_of_the_checkpoint_only():
    (row,) = unprefixed([Row("model.head", "model.U", tied="model.embed")], "model.")
    assert (row.source, row.tied, row.target) == ("head", "embed", "model.U")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "n h m"}, "one '->'"),
        ({"pattern": "a -> b -> c"}, "one '->'"),
        ({"pattern": "(n h m -> n m h"}, "Imbalanced parentheses"),
        ({"pattern": "n n -> n"}, "duplicate dimension"),
        ({"pattern": "n ) -> n"}, "Brackets are not balanced"),
        ({"pattern": "... -> ..."}, r"not numbers or '\.\.\.'"),
        ({"pattern": "n 3 -> n 3"}, r"axes are names, 1, or \(names\)"),
        ({"pattern": "n m -> n m k"}, "'k' is on the right side only"),
        ({"pattern": "n m -> n"}, "'m' is on the left side only"),
        ({"pattern": "n m -> n", "take": {"k": 0}}, "take names 'k'"),
        ({"pattern": "n m -> n m", "take": {"m": 0}}, "keeps it"),
        ({"pattern": "n m -> n m", "take": {"m": slice(2, None)}}, "a start, a stop"),
        ({"pattern": "n m -> n m", "take": {"m": slice(0, 4, 2)}}, "no step"),
        ({"pattern": "n m -> n m", "k": 3}, "'k' is neither an axis"),
        ({"pattern": "n m -> m", "n": "QKV", "take": {"n": 0}}, "has labels"),
        ({"target": "W_{x}"}, "placeholder 'x'"),
    ],
)
def test_a_malformed_row_is_refused_when_it_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        Row(**{"source": "w", "target": "W", **arguments})


def test_the_error_of_a_wrong_shape_names_row_pattern_and_shapes():
    row = Row("q_proj.weight", "attn.W_Q", "(n h) m -> n m h", h=4)
    with pytest.raises(ValueError, match="the shapes do not fit") as caught:
        row.to_target(torch.zeros(13, 6), (3, 6, 4))
    for word in ("q_proj.weight", "attn.W_Q", "(n h) m -> n m h", "[12, 6]", "[13, 6]", "[3, 6, 4]"):
        assert word in str(caught.value)
    with pytest.raises(ValueError, match=r"expected \[n\*h, m\], got \[12\]"):
        row.to_target(torch.zeros(12))
    with pytest.raises(ValueError, match=r"expected \[2, 3\], got \[3, 2\]"):
        Row("w", "W").to_target(torch.zeros(3, 2), (2, 3))
    with pytest.raises(ValueError, match="the size of 'h', 'n' does not follow"):
        Row("w", "W", "(n h) -> n h").to_target(torch.zeros(12))
    with pytest.raises(ValueError, match="outside the 3 of the axis"):
        Row("w", "W", "(x h) -> x h", x=3, take={"x": slice(2, 4)}).to_target(torch.zeros(12))
    with pytest.raises(ValueError, match="does not follow"):
        Row("w", "W", "(x h) -> h", take={"x": 0}).source_shape((4,))
    with pytest.raises(ValueError, match="do not fit"):
        row.write(torch.zeros(3, 4, 6), torch.zeros(12, 6))
