"""Crosscoders: features that were planted in one model or in both are found, and a model compared with itself shares all."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import hooked_lm
from hooked_lm import HookedTransformer
from hooked_lm.demo import verbalizer
from hooked_lm.demo.corpus import training_text
from hooked_lm.hub import LoRA
from hooked_lm.interventions.dictionaries import (
    ActivationBatches,
    Activations,
    BatchTopK,
    Crosscoder,
    PairedActivations,
    TrainingConfig,
    train_crosscoder,
    train_on,
)
from hooked_lm.interventions.dictionaries.crosscoder import BatchTopKOfBoth
from tests.close import assert_close, assert_near

D, SHARED, OF_ONE = 24, 12, 4


def planted(n: int = 6000) -> tuple[Tensor, Tensor]:
    """Vectors [base, tuned] of twelve features of both models, four of the base and four of the tuned one; their directions."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(2, SHARED + 2 * OF_ONE, D, generator=generator), dim=-1)
    directions[1, :SHARED] = directions[0, :SHARED]
    directions[0, -OF_ONE:] = 0
    directions[1, SHARED:-OF_ONE] = 0
    n_features = directions.shape[1]
    on = (torch.rand(n, n_features, generator=generator) < 0.08) * (1 + torch.rand(n, n_features, generator=generator))
    return torch.cat([on @ directions[0], on @ directions[1]], 1), torch.cat([*directions], 1)


@pytest.mark.slow
def test_planted_features_are_found_with_the_model_that_has_them():
    vectors, directions = planted()
    settings = TrainingConfig(steps=1200, vectors_per_step=256, learning_rate=3e-3, dead_after=5000)
    trained = train_on(
        ActivationBatches(vectors), BatchTopKOfBoth.Config(d_in=2 * D, d_sae=40, k=2), settings, progress=False
    )
    found = Crosscoder(trained.sae, "planted", {})
    best = torch.nn.functional.cosine_similarity(directions[:, None], trained.sae.W_dec, dim=-1).max(1)
    assert (best.values > 0.6).all()
    assert (best.values > 0.95).float().mean() > 0.8
    share = found.tuned_share[best.indices]
    assert share[SHARED:-OF_ONE].max() < 0.1
    assert share[-OF_ONE:].min() > 0.9
    assert (share[:SHARED] - 0.5).abs().median() < 0.05
    assert {found.kinds[i] for i in best.indices[-OF_ONE:]} == {"tuned only"}
    ratio = found.latent_scaling(ActivationBatches(vectors)).select(model="ratio", of="error").mean[best.indices]
    assert ratio[:SHARED].median() > 0.8
    assert ratio[SHARED:].abs().max() < 0.2


def exact(tuned: float = 1.0) -> Crosscoder:
    """A crosscoder of two features: one of both models, and one whose direction in the tuned model is scaled."""
    sae = BatchTopK.Config(d_in=4, d_sae=2, k=2).build()
    with torch.no_grad():
        sae.W_dec.copy_(torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, tuned]]))
        sae.W_enc.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]]).T)
        sae.threshold.fill_(0.01)
    return Crosscoder(sae.eval().requires_grad_(False), "here", {})


def test_shares_and_kinds_follow_the_norms_of_directions():
    for tuned, share, kind in (
        (1.0, 0.5, "shared"),
        (0.0, 0.0, "base only"),
        (0.5, 0.25, "mixed"),
        (3.0, 5 / 6, "mixed"),
    ):
        found = exact(tuned)
        assert_close(found.tuned_share, torch.tensor([0.5, share]))
        assert found.kinds == ["shared", kind]
    assert_close(exact().cosine, torch.ones(2))


def test_latent_scaling_finds_what_training_took_out_of_a_direction():
    """The tuned model has the second feature at half its size, though its direction there is zero."""
    features = torch.rand(50, 2, generator=torch.Generator().manual_seed(1)) + 0.5
    vectors = torch.cat([features, features * torch.tensor([1.0, 0.5])], 1)
    found = exact(0.0).latent_scaling(ActivationBatches(vectors))
    assert_close(found.select(of="error").mean, torch.tensor([[1.0, 1], [1, 0.5], [1, 0.5]]), depth=64)
    assert found.select(of="reconstruction", model="ratio", feature=1).mean == 0
    alone = torch.cat([features, features * torch.tensor([1.0, 0.0])], 1)
    assert_near(
        exact(0.0).latent_scaling(ActivationBatches(alone)).select(of="error", model="ratio").mean,
        torch.tensor([1.0, 0.0]), 1e-5, because="rounding of a difference of equal numbers",
    )  # fmt: skip
    silent = torch.cat([features, features], 1) * torch.tensor([1.0, 0, 1, 0])
    assert exact().latent_scaling(ActivationBatches(silent)).mean[:, :, 1].isnan().all()


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing("demo", device="cpu")


TEXTS = [training_text(Random(seed)) for seed in range(60)]


def test_vectors_of_both_models_are_of_the_same_tokens(model: HookedTransformer):
    twin = model.untrained()
    stream = PairedActivations(model, twin, TEXTS, ("resid_post", 1), buffer_prompts=6, seed=3)
    both = stream.fill(1)[0]
    for number, each in enumerate((model, twin)):
        own = [
            each.run_with_cache(TEXTS[i], names_filter="blocks.1.hook_resid_post")[1]["resid_post", 1][0]
            for i in stream.streams[number]._order(0)[6:12]
        ]
        assert_close(both[:, 128 * number :][:, :128], torch.cat(own), depth=64)
    assert stream.site == "blocks.1.hook_resid_post"


def test_an_adapter_is_on_for_the_tuned_model_alone(model: HookedTransformer):
    site, lora = ("resid_post", 1), LoRA.load(verbalizer.PATH)
    options: dict[str, Any] = {"buffer_prompts": 6, "batch_size": 3}
    both = PairedActivations(model, model, TEXTS, site, adapter=lora, **options)
    plain = Activations(model, TEXTS, site, **options)
    with model.with_adapter(lora):
        tuned = plain.fill(0)[0]
    assert_close(both.fill(0)[0], torch.cat([plain.fill(0)[0], tuned], 1), depth=64)
    first, second = both.about()["sha256"]
    assert first == plain.about()["sha256"] != second
    options = {"width": 16, "k": 2, "steps": 2, "vectors_per_step": 16, "progress": False}
    found = train_crosscoder(model, model, TEXTS[:8], site=site, adapter=verbalizer.PATH, **options)
    assert found.about["adapter"] == str(verbalizer.PATH)
    assert not torch.equal(*found.directions)


def test_other_tokens_in_any_text_are_refused(model: HookedTransformer, monkeypatch: pytest.MonkeyPatch):
    twin, texts = model.untrained(), TEXTS[:8]
    stream = PairedActivations(model, twin, texts, ("resid_post", 1), buffer_prompts=4, batch_size=2)
    last, plain = stream.streams[0].batches(1)[-1][-1], stream.streams[1].inputs

    def other(rows: Sequence[int]) -> Any:
        tokens, mask = plain(rows)
        assert isinstance(tokens, Tensor)
        return tokens + torch.tensor([row == last for row in rows])[:, None], mask

    monkeypatch.setattr(stream.streams[1], "inputs", other)
    stream.fill(0)
    with pytest.raises(ValueError, match="the models read other tokens in the same texts"):
        stream.fill(1)


def test_a_model_and_itself_share_all_features(model: HookedTransformer, tmp_path: Path):
    options = {"width": 64, "k": 8, "steps": 30, "vectors_per_step": 64, "progress": False}
    found = train_crosscoder(model, model, TEXTS, site=("resid_post", 1), **options)
    assert_near(
        found.tuned_share, torch.full((64,), 0.5), 1e-3, because="the halves begin alike and see the same, to rounding"
    )
    assert found.kinds == ["shared"] * 64
    base, tuned = found.directions
    assert_near(tuned, base, 1e-3, because="the halves begin alike and see the same, to rounding")
    assert found.figures is not None
    assert "64 shared, 0 base only, 0 tuned only, 0 mixed; explains" in repr(found)
    found.save(tmp_path / "crosscoder")
    again = hooked_lm.load(tmp_path / "crosscoder")
    assert isinstance(again, Crosscoder)
    assert repr(again) == repr(found)
    assert torch.equal(again.sae.W_dec, found.sae.W_dec)
    vectors = PairedActivations(model, model, TEXTS[:5], ("resid_post", 1)).fill(0)[0]
    assert torch.equal(again.features(vectors), found.features(vectors))
    pytest.importorskip("pandas")
    assert found.to_dataframe().columns.tolist() == ["feature", "kind", "tuned_share", "cosine", "base", "tuned"]
    assert found.plot().data


def test_wrong_arguments(model: HookedTransformer):
    with pytest.raises(ValueError, match="reads and writes two vectors side by side, got 3 to 3"):
        Crosscoder(BatchTopK.Config(d_in=3, d_sae=4, k=2).build(), "", {})
    for held_out in (0.0, 1.0):
        with pytest.raises(ValueError, match="held_out must be a fraction"):
            train_crosscoder(model, model, TEXTS, site=("resid_post", 1), width=8, held_out=held_out)
    with pytest.raises(ValueError, match="1 prompts are too few"):
        train_crosscoder(model, model, TEXTS[:1], site=("resid_post", 1), width=8)
