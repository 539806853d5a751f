"""Composition scores against products of matrices that are multiplied out, pair by pair."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.reading.composition import CompositionScores, head_composition
from hooked_lm.models.config.flat import HookedTransformerConfig
from tests.close import assert_close, assert_near
from tests.families import DECODER_CASES
from tests.families._models import hooked


def model_of(family: str) -> Any:
    return hooked(next(case for case in DECODER_CASES if case.family == family))


def dense(attn: Any, head: int, what: str) -> Tensor:
    """A head's matrix [d_model, d_model], multiplied out."""
    kv_head = head // (attn.W_Q.shape[0] // attn.W_K.shape[0])
    if what == "OV":
        return attn.W_V[kv_head] @ attn.W_O[head]
    return attn.W_Q[head] @ attn.W_K[kv_head].T


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gptj", "bamba"])
@torch.no_grad()
def test_scores_are_those_of_the_products(family: str, kind: str) -> None:
    model = model_of(family)
    scores = head_composition(model, kind)
    attention = {i: block.attn for i, block in enumerate(model.blocks) if hasattr(block, "attn")}
    assert (len(attention) < len(model.blocks)) == (family == "bamba")
    expected = torch.full_like(scores.mean, torch.nan)
    for layer, one in attention.items():
        for later, two in attention.items():
            if later <= layer:
                continue
            for head in range(one.W_Q.shape[0]):
                for reader in range(two.W_Q.shape[0]):
                    left, right = dense(one, head, "OV"), dense(two, reader, "OV" if kind == "V" else "QK")
                    right = right.T if kind == "K" else right
                    expected[layer, head, later, reader] = (left @ right).norm() / (left.norm() * right.norm())
    assert_close(scores.mean, expected)
    if family != "bamba":  # which that one cannot stack
        there = ~expected.isnan()
        assert_close(scores.mean[there], model.all_composition_scores(kind)[there])


def random_heads(n_layers: int, seed: int) -> HookedTransformer:
    sizes = {"n_layers": n_layers, "d_model": 48, "n_heads": 6, "d_head": 8, "n_ctx": 8, "d_vocab": 9}
    model = HookedTransformer(HookedTransformerConfig(**sizes, attn_only=True, device="cpu", seed=seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in model.blocks:
            for name in ("W_Q", "W_K", "W_V", "W_O"):
                weight = getattr(block.attn, name)
                weight.copy_(torch.randn(weight.shape, generator=generator))
    return model


def test_a_head_that_reads_what_another_wrote_stands_out() -> None:
    """In random weights: the keys of one head read what one earlier head writes."""
    model = random_heads(3, seed=1)
    shared = torch.linalg.qr(torch.randn(48, 8, generator=torch.Generator().manual_seed(0)))[0]
    with torch.no_grad():
        model.blocks[0].attn.W_O[3] = shared.T
        model.blocks[2].attn.W_K[5] = shared
    found = {kind: head_composition(model, kind).in_deviations() for kind in "QKV"}
    best = found["K"].top(2)
    assert best[["layer", "head", "later_layer", "later_head"]].values[0].tolist() == [0, 3, 2, 5]
    assert best["value"][0] > 6 > 4 > best["value"][1]
    assert max(found[kind].top(1)["value"][0] for kind in "QV") < 4


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_heads_of_random_weights_are_at_chance(kind: str) -> None:
    scores = head_composition(random_heads(3, seed=1), kind)
    deviations = scores.in_deviations().mean
    found = deviations[~deviations.isnan()]
    assert len(found) == 3 * 36
    assert (found.abs() > 2.58).float().mean() <= 0.05  # 1 in 100 of normal numbers
    assert found.mean().abs() < 0.5


def test_the_baseline_is_that_of_dense_random_products() -> None:
    scores = head_composition(random_heads(2, seed=1), "V", n_random=200)
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(200):
        a, b, c, d = (torch.randn(48, 8, generator=generator) for _ in range(4))
        found.append((a @ b.T @ c @ d.T).norm() / ((a @ b.T).norm() * (c @ d.T).norm()))
    assert_near(scores.chance[0, 0, 1, 0, 0], torch.stack(found).mean(), 0.02, because="means of 200 other draws")
    assert_near(scores.spread[0, 0, 1, 0, 0], torch.stack(found).std(), 0.2, because="deviations of 200 other draws")


def test_seeds_tables_and_files(tmp_path: Any) -> None:
    model = random_heads(2, seed=3)
    one, again, other = (head_composition(model, "Q", n_random=2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.chance.nan_to_num(), again.chance.nan_to_num())
    assert not torch.equal(one.chance.nan_to_num(), other.chance.nan_to_num())
    assert list(one.axes) == ["layer", "head", "later_layer", "later_head"]
    assert len(one.to_dataframe().dropna(subset="mean")) == 36
    one.save(tmp_path / "scores.safetensors")
    loaded = CompositionScores.load(tmp_path / "scores.safetensors")
    assert torch.equal(loaded.values.nan_to_num(), one.values.nan_to_num())
    assert loaded.about["kind"] == "Q"
    assert one.select(layer=0, later_layer=1).plot().data
    assert not any(weight.grad_fn for weight in model.parameters())


def test_bad_input() -> None:
    model = random_heads(2, seed=0)
    with pytest.raises(ValueError, match="kind must be 'Q', 'K' or 'V', got 'O'"):
        head_composition(model, "O")
    with pytest.raises(ValueError, match="n_random must be 2 or more, got 0"):
        head_composition(model, n_random=0)
    with pytest.raises(ValueError, match="no attention"):
        head_composition(model_of("mamba"))
    with pytest.raises(ValueError, match="no layer of this model has attention with the weights W_Q, W_K, W_V, W_O"):
        head_composition(model_of("deepseek_v2"))
