"""What a pattern does to a tensor, its inverse, and which results are views."""

from itertools import pairwise
from math import prod

import einops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hooked_lm.weights import export, load
from hooked_lm.weights.rows import Row, check_coverage
from tests.weights.patterns import mappings, row_of, source_tensor, target_parts


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


@pytest.mark.slow
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
