"""Parts called by themselves, with the arguments that the public interface gives them: the same answers."""

import copy
from typing import Any

import originals
import pytest
import torch
from torch import Tensor

from tests.close import assert_close

DECODERS = ["gpt2", "neox", "llama", "gemma2", "toy-ln", "toy-shortformer"]
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])


def streams(*shape: int) -> Tensor:
    return torch.randn(2, 9, *shape, generator=torch.Generator().manual_seed(0))


def both(name: str, call: Any) -> None:
    pair = originals.pair(name)
    assert_close(*(call(model) for model in pair.both))


@pytest.mark.parametrize("name", DECODERS)
def test_ends(name: str) -> None:
    tokens = originals.pair(name).inputs[0]
    both(name, lambda model: model.embed(tokens) * (1 if name != "gemma2" else model.embed(tokens)[0, 0, 0] ** -1))
    both(name, lambda model: model.embed(tokens=tokens)[..., :4] / model.embed(tokens)[..., :1])
    both(name, lambda model: model.unembed(streams(32))) if name != "gemma2" else None
    both(name, lambda model: model.blocks[0].ln1(streams(32)))
    if hasattr(originals.pair(name).ours, "pos_embed"):
        for arguments in ({}, {"past_kv_pos_offset": 3}, {"attention_mask": MASK}):
            both(name, lambda model, arguments=arguments: model.pos_embed(tokens, **arguments))
        both(name, lambda model: model.pos_embed(tokens[:, :2], 7, MASK))


@pytest.mark.parametrize("name", [name for name in DECODERS if "toy" not in name])
def test_mlps(name: str) -> None:
    both(name, lambda model: model.blocks[1].mlp(streams(32)))
    both(name, lambda model: model.blocks[1].mlp(x=streams(32)))
    both(name, lambda model: model.blocks[1].apply_mlp(normalized_resid=streams(32)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_attention(name: str, masked: bool) -> None:
    q, k, v = streams(3, 32).unbind(2)
    mask = MASK if masked else None
    real = MASK[..., None].bool()
    added = torch.randn(2, 1, 1, 9, generator=torch.Generator().manual_seed(1))
    for call in (
        lambda attn: attn(query_input=q, key_input=k, value_input=v, attention_mask=mask),
        lambda attn: attn(q, k, v, None, None, mask),
        lambda attn: attn(q, k, v, additive_attention_mask=added, attention_mask=mask),
    ):
        both(name, lambda model, call=call: call(model.blocks[1].attn).where(real, 0.0))


@pytest.mark.parametrize("name", DECODERS)
def test_a_layer_with_an_entry_of_a_cache(name: str) -> None:
    """Six tokens, then three more that see them."""
    pair = originals.pair(name)
    x = streams(32)
    found = []
    for model, kind in zip(pair.both, (originals.hooked_lm, originals.transformer_lens), strict=True):
        if kind is originals.hooked_lm:
            from hooked_lm.components.kv_cache import KeyValueCache as Cache
        else:
            from transformer_lens import TransformerLensKeyValueCache as Cache
        entry = Cache.init_cache(model.cfg, "cpu", 2)[1]
        block = model.blocks[1]
        shift = {"shortformer_pos_embed": streams(32)[:, :6]} if name == "toy-shortformer" else {}
        first = block(resid_pre=x[:, :6], past_kv_cache_entry=entry, **shift)
        shift = {"shortformer_pos_embed": streams(32)[:, 6:]} if name == "toy-shortformer" else {}
        found.append(torch.cat([first, block(x[:, 6:], past_kv_cache_entry=entry, **shift)], 1))
    assert_close(*found)


@pytest.mark.parametrize("name", DECODERS)
def test_blocks(name: str) -> None:
    both(name, lambda model: model.blocks[0](streams(32)))
    real = MASK[..., None].bool()
    both(name, lambda model: model.blocks[0](resid_pre=streams(32), attention_mask=MASK).where(real, 0.0))


def test_parts_of_an_encoder() -> None:
    tokens = originals.pair("bert").inputs[0]
    added = torch.zeros(2, 1, 1, 9)
    added[0, ..., 5:] = float("-inf")
    both("bert", lambda model: model.embed(tokens))
    both("bert", lambda model: model.embed(input_ids=tokens, token_type_ids=tokens % 2))
    both("bert", lambda model: model.blocks[0](streams(32)))
    both("bert", lambda model: model.blocks[0](streams(32), additive_attention_mask=added))
    both("bert", lambda model: model.mlm_head(resid=streams(32)))
    both("bert", lambda model: model.pooler(resid=streams(32)))


def test_a_module_in_the_place_of_positions_is_called_as_there() -> None:
    model = copy.deepcopy(originals.pair("gpt2").ours)
    own, seen = model.pos_embed, []

    class Mine(torch.nn.Module):
        def forward(self, tokens: Tensor, past_kv_pos_offset: int = 0, attention_mask: Any = None) -> Tensor:
            seen.append((tokens, past_kv_pos_offset))
            return own.W_pos[past_kv_pos_offset : past_kv_pos_offset + tokens.shape[1]].expand(len(tokens), -1, -1)

    tokens, expected = originals.pair("gpt2").inputs[0], model(originals.pair("gpt2").inputs[0])
    model.pos_embed = Mine()
    model.setup()
    assert torch.equal(model(tokens), expected)
    assert torch.equal(seen[0][0], tokens)
