"""Attributes of parts, the order of parameters, entries of state dicts: as in the original."""

import copy
from typing import Any

import originals
import pytest
import torch
from torch import Tensor

from tests.close import assert_close

DECODERS = [*originals.DECODERS, *originals.TOYS]
RENAMED = {"W_router": "W_gate.weight"}


def names(model: Any, lacking: set[str]) -> list[str]:
    """Its parameters in our names, but for those that the other lacks."""
    found = [
        name.replace("._", ".").replace("mlp.W_gate.weight", "mlp.W_router") for name, _ in model.named_parameters()
    ]
    found = [name.removesuffix(".weight") for name in found]
    return [name for name in found if name not in lacking]


@pytest.mark.parametrize("name", [name for name in originals.NAMES if name not in ("t5", "mixtral")])
def test_parameters_come_in_the_same_order(name: str) -> None:
    """The encoder's embedding has another order of computation: types before positions."""
    pair = originals.pair(name)
    ours, theirs = names(pair.ours, set()), names(pair.theirs, set())
    both = {*ours} & {*theirs} - {"embed.pos_embed.W_pos", "nsp_head.W", "nsp_head.b"}
    assert [n for n in ours if n in both] == [n for n in theirs if n in both]
    assert len(both) > 9


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
