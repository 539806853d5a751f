"""Attributes of parts and constants of state dicts: as in the original."""

import copy

import originals
import pytest
import torch
from torch import Tensor

from tests.close import assert_close


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert", "toy-solu"])
def test_parts_answer_to_their_names(name: str) -> None:
    pair = originals.pair(name)
    for ours, theirs in zip(pair.ours.blocks, pair.theirs.blocks, strict=True):
        for leaf in ("attn_type", "layer_id") if name != "bert" else ("attn_type",):
            assert getattr(ours.attn, leaf) == getattr(theirs.attn, leaf)
        assert_close(torch.tensor(ours.attn.attn_scale), torch.tensor(float(theirs.attn.attn_scale)))
        for leaf in ("OV", "QK"):
            assert_close(getattr(ours.attn, leaf).AB, getattr(theirs.attn, leaf).AB)
        assert (ours.ln1.length, ours.ln1.eps) == (theirs.ln1.length, theirs.ln1.eps)
        x = torch.linspace(-3, 3, 48)[None, None]
        assert ours.mlp.d_mlp == theirs.mlp.d_mlp
        assert_close(ours.mlp.act_fn(x), theirs.mlp.act_fn(x))


def test_mixtures_answer_to_their_names() -> None:
    pair = originals.pair("mixtral")
    for ours, theirs in zip(pair.ours.blocks, pair.theirs.blocks, strict=True):
        for leaf in ("num_experts", "experts_per_token", "d_mlp"):
            assert getattr(ours.mlp, leaf) == getattr(theirs.mlp, leaf)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tables_of_rotary_embeddings_can_be_shared(name: str) -> None:
    pair = originals.pair(name)
    for ours, theirs in zip(pair.ours.blocks, pair.theirs.blocks, strict=True):
        for leaf in ("rotary_sin", "rotary_cos"):
            own: Tensor = getattr(ours.attn, leaf)
            expected = getattr(theirs.attn, leaf)
            assert_close(own[: len(expected)], expected)
            setattr(ours.attn, leaf, expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_constants_are_in_the_state_dict(name: str) -> None:
    """And it is loaded strictly all the same, theirs into ours and ours into ours."""
    pair = originals.pair(name)
    state, expected = pair.ours.state_dict(), pair.theirs.state_dict()
    constants = [n for n in expected if n.endswith((".mask", ".IGNORE"))]
    assert constants
    assert all(torch.equal(state[n], expected[n]) for n in constants)
    ours = copy.deepcopy(pair.ours)
    ours.load_state_dict(state, strict=True)
    ours.blocks[0].attn.load_state_dict(ours.blocks[0].attn.state_dict(), strict=True)
