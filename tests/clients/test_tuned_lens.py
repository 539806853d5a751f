"""tuned-lens: lenses are made from a model's final norm and unembedding, and read what its cache holds."""

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from tuned_lens.model_surgery import get_final_norm, get_transformer_layers, get_unembedding_matrix
from tuned_lens.nn import LogitLens, TunedLens, Unembed
from tuned_lens.nn.lenses import TunedLensConfig
from tuned_lens.plotting import PredictionTrajectory

from hooked_lm import HookedTransformer, pretrained
from hooked_lm.analysis import logit_lens
from tests.close import assert_apart, assert_close, assert_near
from tests.families import DECODER_CASES, Case, reference
from tests.families._models import hooked, prompt

FAMILIES = ["gpt2", "llama", "gpt_neox", "gptj", "opt", "bloom"]  # whose models of transformers it knows too
TEXT = "When Mary and John went to the store, John gave a drink to Mary"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@lru_cache
def of_family(name: str) -> Case:
    return next(case for case in DECODER_CASES if case.family == name)


def with_bias(model: HookedTransformer) -> HookedTransformer:
    """A copy whose unembedding has a bias: one that its checkpoint does not have is None in ours, and theirs reads it."""
    model = copy.deepcopy(model)
    if model.unembed.b_U is None:
        model.unembed.b_U = torch.nn.Parameter(torch.zeros(model.cfg.d_vocab_out))
    return model


def stream(case: Case) -> Tensor:
    return torch.randn(2, 5, hooked(case).cfg.d_model, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_unembedding_as_with_the_model_of_transformers(family: str) -> None:
    case = of_family(family)
    found, expected = Unembed(with_bias(hooked(case))), Unembed(reference(case))
    x = stream(case)
    assert_close(found(x), expected(x))
    assert_apart(found(x), found(x.flip(-1)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folded_model_unembeds_to_the_same_probabilities(family: str) -> None:
    case = of_family(family)
    folded = with_bias(pretrained.from_pretrained("tiny", hf_model=reference(case)))
    x = stream(case)
    centered = x - x.mean(-1, keepdim=True) if folded.cfg.normalization_type == "LNPre" else x
    found, expected = LogitLens.from_model(folded)(centered, 0), LogitLens.from_model(reference(case))(x, 0)
    assert_close(found.log_softmax(-1), expected.log_softmax(-1))


def test_its_copies_are_apart_from_the_model(model: HookedTransformer) -> None:
    assert get_final_norm(model) is model.ln_final
    assert torch.equal(get_unembedding_matrix(model).weight, model.W_U.T)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    lens = LogitLens.from_model(model)
    with torch.no_grad():
        for weight in lens.parameters():
            weight.zero_()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("batch", [True, False])
def test_a_trajectory_of_our_cache(model: HookedTransformer, batch: bool) -> None:
    tokens = model.to_tokens(TEXT)
    logits, cache = model.run_with_cache(tokens, remove_batch_dim=not batch)
    if not batch:
        tokens, logits = tokens[0], logits[0]
    targets = torch.cat([tokens[..., 1:], tokens[..., :1]], -1)
    lens = LogitLens.from_model(model)
    found = PredictionTrajectory.from_lens_and_cache(lens, tokens, cache, logits, targets=targets)
    streams = [cache["resid_pre", layer] for layer in range(model.cfg.n_layers)]
    by_hand = torch.stack([*(model.ln_final(stream) @ model.W_U + model.b_U for stream in streams), logits], dim=-3)
    expected = by_hand.log_softmax(-1).detach().numpy()
    assert_close(found.log_probs, expected)
    assert found.num_layers == model.cfg.n_layers
    loss = found.cross_entropy().stats
    theirs = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.flatten(), reduction="none"
    )
    assert_close(loss[-1], theirs.detach().numpy())
    assert loss[0].mean() > loss[-1].mean() + 1, "the model should know more than its embedding does"


def test_our_lens_says_the_same(model: HookedTransformer) -> None:
    tokens = model.to_tokens(TEXT)
    _, cache = model.run_with_cache(tokens)
    lens = LogitLens.from_model(model)
    ours = logit_lens(model, tokens, site="resid_pre", k=3)
    for layer in range(model.cfg.n_layers):
        top = lens(cache["resid_pre", layer], layer)[0].topk(3)
        assert torch.equal(ours.tokens[layer, :, 0], top.indices)
        assert_close(ours.logits[layer, :, 0], top.values)


@pytest.mark.parametrize("family", FAMILIES[:4])
def test_a_trajectory_as_with_the_model_of_transformers(family: str) -> None:
    case = of_family(family)
    model, tokens = with_bias(hooked(case)), prompt(case, batch=1)
    logits, cache = model.run_with_cache(tokens)
    lens = LogitLens.from_model(reference(case))
    expected = PredictionTrajectory.from_lens_and_model(lens, reference(case), tokens[0].tolist())
    found = PredictionTrajectory.from_lens_and_cache(LogitLens.from_model(model), tokens, cache, logits)
    assert_close(found.log_probs[0], expected.log_probs)
    other = PredictionTrajectory.from_lens_and_cache(
        LogitLens.from_model(model), tokens, cache, logits, residual_component="resid_post"
    )
    assert_apart(other.log_probs, found.log_probs)


@pytest.mark.parametrize("statistic", ["entropy", "forward_kl", "cross_entropy", "rank", "max_probability"])
def test_statistics_of_a_trajectory(model: HookedTransformer, statistic: str) -> None:
    """Their numbers and labels; the figures need plotly before 6, since they set a property that is gone."""
    tokens = model.to_tokens(TEXT)
    logits, cache = model.run_with_cache(tokens)
    targets = tokens.roll(-1, 1)
    lens = LogitLens.from_model(model)
    found = getattr(PredictionTrajectory.from_lens_and_cache(lens, tokens, cache, logits, targets=targets), statistic)()
    streams = [cache["resid_pre", layer] for layer in range(model.cfg.n_layers)]
    logs = torch.stack([*(model.ln_final(stream)[0] @ model.W_U + model.b_U for stream in streams), logits[0]])
    logs = logs.log_softmax(-1).detach()
    of_target = logs.gather(-1, targets.expand(len(logs), -1)[..., None])
    expected = {
        "entropy": -(logs.exp() * logs).sum(-1),
        "max_probability": logs.exp().amax(-1),
        "forward_kl": (logs[-1].exp() * (logs[-1] - logs)).sum(-1),
        "cross_entropy": -of_target[..., 0],
        "rank": (logs >= of_target).sum(-1).float(),
    }[statistic]
    assert_close(torch.tensor(found.stats).float(), expected)
    assert len(found.sequence_labels) == tokens.shape[1]
    assert found.trajectory_labels.label_strings.shape == found.stats.shape


def test_a_tuned_lens_learns_from_our_caches(model: HookedTransformer, tmp_path: Path) -> None:
    """Translators start as the identity; a few steps bring the lens nearer to what the model says in the end."""
    config = TunedLensConfig("demo", model.cfg.d_model, model.cfg.n_layers)
    unembed = Unembed(model)
    lens = TunedLens(unembed, config)
    tokens = model.to_tokens([TEXT, "When Tom and Lucy went to the park, Tom gave a book to Lucy"])
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
    final = logits.log_softmax(-1)

    def divergence(layer: int) -> Tensor:
        guess = lens(cache["resid_pre", layer], layer).log_softmax(-1)
        return (final.exp() * (final - guess)).sum(-1).mean()

    plain = LogitLens(unembed)
    assert_close(lens(cache["resid_pre", 1], 1), plain(cache["resid_pre", 1], 1))
    before = [divergence(layer).item() for layer in range(model.cfg.n_layers)]
    adam = torch.optim.Adam(lens.layer_translators.parameters(), lr=1e-3)
    for _ in range(60):
        adam.zero_grad()
        loss: Any = sum(divergence(layer) for layer in range(model.cfg.n_layers))
        loss.backward()
        adam.step()
    after = [divergence(layer).item() for layer in range(model.cfg.n_layers)]
    assert all(new < 0.6 * old for old, new in zip(before, after, strict=True)), (before, after)
    assert all(weight.grad is None for weight in model.parameters())
    lens.save(tmp_path)
    again = TunedLens.from_unembed_and_pretrained(Unembed(model), str(tmp_path))
    assert_close(again(cache["resid_pre", 2], 2), lens(cache["resid_pre", 2], 2))


def test_the_unembedding_is_inverted(model: HookedTransformer) -> None:
    """By gradients through our norm."""
    unembed = Unembed(model)
    with torch.no_grad():
        _, cache = model.run_with_cache(TEXT)
        logits = unembed(cache["resid_post", 3][0, :3])
    found = unembed.invert(logits, h0=torch.randn(3, model.cfg.d_model), tol=1e-4)
    assert found.kl < 1e-2
    again = model.unembed(found.preimage[None])[0].log_softmax(-1)
    assert_near(again.exp(), logits.softmax(-1), 0.1, because="it is searched for, until the divergence is small")


def test_its_surgery_of_layers_knows_models_of_transformers_alone(model: HookedTransformer) -> None:
    """So ablating layers and extracting causal bases is, with any HookedTransformer, not in it."""
    with pytest.raises(ValueError, match="does not have a `base_model`"):
        get_transformer_layers(model)
    with pytest.raises(AttributeError, match="config"):
        TunedLens.from_model(model)
