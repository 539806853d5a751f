"""Attention and blocks called by themselves with the public interface's arguments, or with a context as models call them."""

from copy import deepcopy

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from hooked_lm import HookedEncoderDecoder
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


# ---- encoder-decoders ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2, "vocab_size": 20}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def test_layers_of_an_encoder_decoder(t5: T5ForConditionalGeneration) -> None:
    """Called by themselves they compute what those of transformers do: the first adds its bias, the others none."""
    model = HookedEncoderDecoder.from_pretrained("t5", hf_model=t5)
    at = torch.arange(6)
    for layer in range(2):
        theirs, ours = t5.encoder.block[layer], model.encoder[layer]
        assert ours.attn.has_relative_attention_bias == (layer == 0)
        assert_close(ours(X), theirs(X, cache_position=at)[0])
        expected = theirs.layer[0].SelfAttention(X, cache_position=at)[0]
        assert_close(ours.attn(X, X, X), expected)
        theirs, ours = t5.decoder.block[layer], model.decoder[layer]
        source = X[:, :5] + 1
        causal = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
        expected = theirs(X, attention_mask=causal, encoder_hidden_states=source, cache_position=at)[0]
        assert_close(ours(X, encoder_hidden_states=source), expected)
        expected = theirs.layer[1].EncDecAttention(X, key_value_states=source, cache_position=at)[0]
        assert_close(ours.cross_attn(X, source, source), expected)


def test_the_bias_of_a_stack_is_given_to_its_layers(t5: T5ForConditionalGeneration) -> None:
    model = HookedEncoderDecoder.from_pretrained("t5", hf_model=t5)
    first, tokens = model.encoder[0].attn, ids(2, 6, seed=1) % 20
    bias = first.compute_relative_attention_bias(6, 6)
    assert_close(bias, t5.encoder.block[0].layer[0].SelfAttention.compute_bias(6, 6))
    assert first.rel_pos_bias.weight is model.encoder_rel_pos_bias.W_rel
    assert (first.relative_attention_num_buckets, first.relative_attention_max_distance) == (32, 128)
    assert not [name for name, _ in first.named_parameters() if "rel" in name], "the weights are the stack's"
    with pytest.raises(AttributeError, match="rel_pos_bias"):
        model.encoder[1].attn.compute_relative_attention_bias(6, 6)
    resid = model.embed(tokens)
    for block in model.encoder:
        resid = block(resid_pre=resid, position_bias=bias)
    assert_close(model.encoder_final_ln(resid), model.encode(tokens))
    again = deepcopy(model)
    assert again.encoder[0].attn.rel_pos_bias is again.encoder_rel_pos_bias


def test_cross_attention_reads_one_source_and_its_mask(t5: T5ForConditionalGeneration) -> None:
    block = HookedEncoderDecoder.from_pretrained("t5", hf_model=t5).decoder[1]
    cross, source = block.cross_attn, X + 1
    masked = torch.tensor([[1, 1, 1, 0, 0, 0]]).expand(2, -1)
    assert_close(cross(X, source, attention_mask=masked), cross(X, source[:, :3]))
    by_mask = block(X, encoder_hidden_states=source, encoder_attention_mask=masked)
    assert_close(by_mask, block(X, encoder_hidden_states=source[:, :3]))
    with pytest.raises(ValueError, match="one source"):
        cross(X, source, source.clone())
    with pytest.raises(ValueError, match="give encoder_hidden_states"):
        block(X, attention_mask=masked)
