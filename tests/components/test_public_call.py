"""Attention and blocks called by themselves with the public interface's arguments, or with a context as models call them."""

import pytest
import torch

from hooked_lm.components.context import Context
from hooked_lm.components.kv_cache import KeyValueCacheEntry
from tests.close import assert_apart, assert_close
from tests.models.toys import ids, toy

KINDS = ["standard", "rotary", "parallel", "windowed", "alibi", "post_norm", "attn_only"]
X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_those_of_a_context(kind: str) -> None:
    block = toy(kind).blocks[1]
    by_context = Context(6, X.device, MASK.bool())
    assert torch.equal(block(resid_pre=X, attention_mask=MASK), block(X, by_context))
    assert torch.equal(block(X, None, None, MASK), block(X, by_context))
    assert torch.equal(block.attn(X, X, X, attention_mask=MASK), block.attn(X, X, X, by_context, 1))
    assert torch.equal(block.attn(query_input=X, key_input=X, value_input=X), block.attn(X))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_added_to_the_scores(kind: str) -> None:
    """Minus infinity for the last key of each later query, in the kernel and in steps."""
    added = torch.zeros(1, 1, 6, 6)
    added[..., 4:, 1] = float("-inf")
    for fused in ("auto", "never"):
        model = toy(kind, fused_attention=fused)
        attn = model.blocks[1].attn
        expected = attn(X)
        found = attn(X, X, X, additive_attention_mask=added)
        assert_close(found[:, :4], expected[:, :4])
        if kind != "windowed":  # its local layers see three keys, and this is the global one
            assert_apart(found[:, 4:], expected[:, 4:])
        model.blocks[1].attn.hook_attn_scores.add_hook(lambda value, hook: value + added)
        assert_close(found, attn(X))


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_has_the_earlier_tokens(kind: str) -> None:
    block, entry = toy(kind).blocks[1], KeyValueCacheEntry()
    parts = [block(X[:, :4], past_kv_cache_entry=entry), block(X[:, 4:], past_kv_cache_entry=entry)]
    assert entry.length == 6
    assert_close(torch.cat(parts, 1), block(X))


def test_unknown_arguments_are_refused_by_name() -> None:
    block = toy("standard").blocks[0]
    with pytest.raises(ValueError, match="position_bias"):
        block.attn(X, X, X, position_bias=torch.zeros(1, 4, 6, 6))
    with pytest.raises(TypeError, match="attention_mask"):
        block(X, atention_mask=MASK)
    with pytest.raises(TypeError, match="past_kv_cache_entry"):
        block.attn(X, X, X, KeyValueCacheEntry(), past_kv_cache_entry=KeyValueCacheEntry())
    with pytest.raises(ValueError, match="has 5 positions"):
        block(X, attention_mask=MASK[:, 1:])


def test_positions_are_counted_by_the_embedding() -> None:
    model = toy("standard")
    tokens = ids(batch=2, n_pos=6)
    W_pos = model.W_pos
    assert torch.equal(model.pos_embed(tokens), W_pos[:6].expand(2, -1, -1))
    assert torch.equal(model.pos_embed(tokens, past_kv_pos_offset=3), W_pos[3:9].expand(2, -1, -1))
    padded = model.pos_embed(tokens, attention_mask=MASK)
    assert torch.equal(padded[0], torch.cat([torch.zeros(2, 32), W_pos[:4]]))
    assert torch.equal(model.pos_embed(tokens[:, 4:], 4, MASK)[0], W_pos[2:4])
    logits = model(tokens, attention_mask=MASK)
    assert_close(logits[0, 2:], model(tokens[:1, 2:])[0])
