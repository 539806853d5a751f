"""Rows: ranges of placeholders, parts that overlap or are missing, and the errors of wrong rows."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hooked_lm.weights.rows import Row, check_coverage, expand, unprefixed
from tests.weights.patterns import mappings, row_of, source_tensor


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
