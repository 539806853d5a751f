"""Singular vectors against those of matrices that are multiplied out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.reading.svd_interpreter import SVDInterpreter
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.models.config.flat import HookedTransformerConfig
from tests.close import assert_close, assert_near
from tests.families import DECODER_CASES
from tests.families._models import hooked


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def model_of(family: str) -> Any:
    return hooked(next(case for case in DECODER_CASES if case.family == family))


def same_up_to_sign(found: Tensor, expected: Tensor) -> None:
    """[d_vocab, vector] each."""
    signs = (found * expected).sum(0).sign()
    assert_near(found * signs, expected, 1e-3, because="vectors are as exact as their values are far apart")


@torch.no_grad()
def dense(model: Any, vector_type: str, layer: int, head: int) -> Tensor:
    """The matrix whose right singular vectors stand in the stream, norms' weights and all."""
    block = model.blocks[layer]

    def gained(norm: Any, rows: Tensor, centre_last: bool) -> Tensor:
        if isinstance(norm, torch.nn.Identity):
            return rows
        gain = torch.ones(rows.shape[-1]) if norm.w is None else norm.w + norm.cfg.offset
        centred = torch.eye(rows.shape[-1])
        if type(norm).__name__ == "LayerNorm":
            centred = centred - 1 / rows.shape[-1]
        return rows @ torch.diag(gain) @ centred if centre_last else rows @ centred @ torch.diag(gain)

    before_mlp = block.ln1 if type(block).__name__ == "SharedNormBlock" else block.ln2
    if vector_type == "OV":
        attn = block.attn
        kv_head = head // (attn.W_Q.shape[0] // attn.W_V.shape[0])
        read = gained(block.ln1, attn.W_V[kv_head].T, True).T
        return gained(norm_of(block, "ln1_post"), read @ attn.W_O[head], False)
    if vector_type == "w_out":
        return gained(norm_of(block, "ln2_post"), block.mlp.W_out, False)
    weight = block.mlp.W_in if vector_type == "w_in" else block.mlp.W_gate
    return gained(before_mlp, weight.T, True)


def unembedded(model: Any, V: Tensor) -> Tensor:
    """The logits of each direction, the final norm's weight included: [d_vocab, vector]."""
    norm = norm_of(model, "ln_final")
    centred = V - V.mean(-1, keepdim=True) if type(norm).__name__ == "LayerNorm" else V
    return ((centred if norm.w is None else centred * (norm.w + norm.cfg.offset)) @ model.unembed.W_U).T


@pytest.mark.parametrize("vector_type", ["OV", "w_in", "w_gate", "w_out"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gptj"])
@torch.no_grad()
def test_singular_vectors_are_those_of_the_matrix(family: str, vector_type: str) -> None:
    model, layer, head = model_of(family), 1, 2
    interpreter = SVDInterpreter(model)
    if vector_type == "w_gate" and not hasattr(model.blocks[layer].mlp, "W_gate"):
        with pytest.raises(ValueError, match="is not gated"):
            interpreter.get_singular_vectors("w_gate", layer)
        return
    matrix = dense(model, vector_type, layer, head)
    _, S, Vh = torch.linalg.svd(matrix.double())
    found = interpreter.get_singular_vectors(vector_type, num_vectors=4, layer_index=layer, head_index=head)
    assert found.shape == (model.cfg.d_vocab, 1, 4)
    same_up_to_sign(found[:, 0], unembedded(model, Vh[:4].float()))
    table = interpreter.top_tokens(vector_type, layer, num_vectors=4, head_index=head, k=3)
    assert_close(torch.tensor(table["singular value"].unique().tolist()), S[:4].float())
    for (vector, sign), rows in table.groupby(["vector", "sign"]):
        best = found[:, 0, vector].sort(descending=sign == "+")
        assert rows["token"].tolist() == best.indices[:3].tolist()
        assert_close(torch.tensor(rows["value"].tolist()), best.values[:3])


def test_of_a_folded_model_it_is_the_plain_product(demo: HookedTransformer) -> None:
    with torch.no_grad():
        matrix = demo.W_V[3, 4] @ demo.W_O[3, 4]
        Vh = torch.linalg.svd(matrix).Vh[:5]
        found = SVDInterpreter(demo).get_singular_vectors("OV", 3, 5, 4)
        same_up_to_sign(found[:, 0], (Vh @ demo.W_U).T)
    shuffled = found[torch.randperm(1506, generator=torch.Generator().manual_seed(0))]
    with pytest.raises(AssertionError):  # it can fail
        same_up_to_sign(shuffled[:, 0], (Vh @ demo.W_U).T.detach())


def test_a_planted_direction_is_found(demo: HookedTransformer) -> None:
    weight = demo.blocks[2].mlp.W_out
    before = weight.detach().clone()
    mary = demo.to_single_token(" Mary")
    try:
        with torch.no_grad():
            direction = demo.W_U[:, mary] / demo.W_U[:, mary].norm()
            weight += 100 * torch.outer(torch.ones(512) / 512**0.5, direction)
        table = SVDInterpreter(demo).top_tokens("w_out", 2, num_vectors=1, k=1)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert " Mary" in table["token"].tolist()
    assert_near(table["singular value"][0], 100, 0.05, because="what was there before is added to it")


def test_bad_input(demo: HookedTransformer) -> None:
    interpreter = SVDInterpreter(demo)
    with pytest.raises(ValueError, match="vector_type must be one of OV, w_in, w_gate, w_out, got 'QK'"):
        interpreter.get_singular_vectors("QK", 0)
    with pytest.raises(ValueError, match="give head_index, from 0 to 7"):
        interpreter.get_singular_vectors("OV", 0)
    with pytest.raises(IndexError, match="head 8 is out of range"):
        interpreter.get_singular_vectors("OV", 0, head_index=8)
    with pytest.raises(IndexError, match="layer 4 is out of range"):
        interpreter.get_singular_vectors("w_in", 4)
    with pytest.raises(ValueError, match="num_vectors must be from 1 to 16"):
        interpreter.get_singular_vectors("OV", 0, 17, 0)
    with pytest.raises(ValueError, match="num_vectors must be from 1 to 128"):
        interpreter.get_singular_vectors("w_in", 0, 0)
    with pytest.raises(ValueError, match="k must be from 1 to 1506"):
        interpreter.top_tokens("w_in", 0, k=0)
    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 8, "d_vocab": 9}
    attn_only = HookedTransformer(HookedTransformerConfig(**sizes, attn_only=True, device="cpu", seed=0))
    with pytest.raises(ValueError, match="layer 0 has no MLP"):
        SVDInterpreter(attn_only).get_singular_vectors("w_out", 0)
    assert SVDInterpreter(attn_only).get_singular_vectors("OV", 0, 2, 1).shape == (9, 1, 2)
    with pytest.raises(ValueError, match="mixture of experts"):
        SVDInterpreter(model_of("mixtral")).get_singular_vectors("w_in", 0)
