"""The report on a feature of a dictionary, against the model run by hand, and its dashboard in the layout of SAEDashboard."""

import json
import math
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.analysis import FeatureReport, feature_report, max_activating_examples, write_dashboards
from hooked_lm.interventions.dictionaries import SAE, TopK, Transcoder
from hooked_lm.interventions.dictionaries.site import site_read
from tests.close import assert_close, assert_equal, assert_near

SITE = "blocks.1.hook_mlp_out"
TEXTS = [
    "When Mary and John went to the store, John gave a drink to Mary",
    "The capital of France is Paris",
    "Yesterday, the farmers with the roads were red.",
    "The capital of Italy is",
]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def sae() -> SAE:
    return TopK.Config(d_in=128, d_sae=64, k=6, hook_point=SITE).build(seed=3).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def feature(model: HookedTransformer, sae: SAE) -> int:
    """A feature that is active at some positions, not at all."""
    counts = sum((features != 0).sum(0) for features in by_hand(model, sae))
    return int((counts - 6).abs().argmin())


@torch.no_grad()
def by_hand(model: HookedTransformer, sae: SAE) -> list[torch.Tensor]:
    """The features of each text, without its BOS."""
    found = []
    for text in TEXTS:
        _, cache = model.run_with_cache(text, names_filter=SITE)
        found.append(sae.encode(cache[SITE])[0, 1:])
    return found


@torch.no_grad()
def ablated_by_hand(model: HookedTransformer, sae: SAE, feature: int) -> tuple[list[float], torch.Tensor]:
    """The sum of losses with and without the feature divided by their number, and the change of the mean probabilities."""
    losses, changes = [[], []], []

    def without(value: torch.Tensor, hook: Any) -> torch.Tensor:
        features = sae.encode(value)[..., feature, None] * sae.W_dec[feature]
        features[:, 0] = 0
        return value - features

    for text in TEXTS:
        tokens = model.to_tokens(text)
        runs = model(tokens), model.run_with_hooks(tokens, fwd_hooks=[(SITE, without)])
        _, cache = model.run_with_cache(tokens, names_filter=SITE)
        active = (sae.encode(cache[SITE])[0, :, feature] != 0) & (torch.arange(tokens.shape[1]) > 0)
        p = [run[0].softmax(-1) for run in runs]
        changes.append((p[1] - p[0])[active])
        for place in active.nonzero()[:, 0].tolist():
            if place + 1 < tokens.shape[1]:
                for kept, one in zip(losses, p, strict=True):
                    kept.append(-math.log(one[place, tokens[0, place + 1]]))
    return [sum(some) / len(some) for some in losses], torch.cat(changes).mean(0)


def test_the_numbers_are_those_of_the_model_run_by_hand(model: HookedTransformer, sae: SAE, feature: int) -> None:
    report = feature_report(model, sae, feature, TEXTS, skip=1, k=4, batch_size=3)
    values = torch.cat(by_hand(model, sae))[:, feature]
    assert (report.n_positions, report.n_active) == (len(values), int((values != 0).sum()))
    assert int(report.counts.sum()) == report.n_active
    assert_close(report.examples.values[0], values.max(), depth=3)
    losses, changes = ablated_by_hand(model, sae, feature)
    assert_close(torch.tensor([report.loss, report.loss_ablated]), torch.tensor(losses), depth=10)
    assert abs(report.loss_ablated - report.loss) > 1e-4, "ablating it does something"
    token, value = report.tables["more likely without it"][0]
    assert token == model.to_single_str_token(int(changes.argmax()))
    assert_close(value, changes.max().item(), scale=1.0)
    direction = sae.W_dec[feature]
    effects = (direction - direction.mean()) @ model.W_U  # the final norm centres, and its gain is folded
    assert_close(report.tables["promoted"][0][1], effects.max().item(), scale=effects.abs().max())
    assert report.tables["suppressed"][0][0] == model.to_single_str_token(int(effects.argmin()))


def test_max_activating_examples_of_a_feature(model: HookedTransformer, sae: SAE, feature: int) -> None:
    found = max_activating_examples(model, TEXTS, sae=sae, feature=feature, k=50, skip=1)
    values = torch.cat(by_hand(model, sae))[:, feature]
    assert_close(found.values, values[values != 0].sort(descending=True).values, depth=3)
    assert f"feature {feature}" in repr(found)
    named = max_activating_examples(model, TEXTS, site=("mlp_out", 1), sae=sae, feature=feature, k=50, skip=1)
    assert_equal(named.values, found.values)
    with pytest.raises(IndexError, match="feature 64 is out of range"):
        max_activating_examples(model, TEXTS, sae=sae, feature=64)
    with pytest.raises(ValueError, match="give both"):
        max_activating_examples(model, TEXTS, site=SITE, feature=3)
    with pytest.raises(ValueError, match="no direction, neuron or head"):
        max_activating_examples(model, TEXTS, sae=sae, feature=3, neuron=2)
    with pytest.raises(ValueError, match="give site="):
        max_activating_examples(model, TEXTS)


def test_files_and_pages(model: HookedTransformer, sae: SAE, feature: int, tmp_path: Path) -> None:
    report = feature_report(model, sae, feature, [*TEXTS, "<script>alert(1)</script> is"], k=3)
    report.save(tmp_path / "report")
    found = FeatureReport.load(tmp_path / "report")
    assert (found.tables, found.about, found.facts(), repr(found)) == (
        report.tables,
        report.about,
        report.facts(),
        repr(report),
    )
    assert_equal(found.counts, report.counts)
    assert_equal(found.examples.activations, report.examples.activations)
    page = report.plot().write_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert report.facts()["active at"] in page
    assert page.count("<tr>") == len(report.examples) + 12
    assert len(report.to_dataframe()) == len(report.examples) + 12
    assert len(repr(report)) < 160


def test_a_feature_that_is_never_active_has_a_report(model: HookedTransformer) -> None:
    sae = SAE.Config(d_in=128, d_sae=4, hook_point=SITE).build().eval()
    with torch.no_grad():
        sae.b_enc[2] = -1e6
    report = feature_report(model, sae, 2, TEXTS)
    assert (report.n_active, report.density, len(report.examples)) == (0, 0.0, 0)
    assert report.loss != report.loss
    assert report.facts()["loss without it"].startswith("no value")
    assert "active nowhere" in report.plot().to_html()
    assert report.tables["promoted"]


def test_transcoders_are_ablated_where_they_write(model: HookedTransformer) -> None:
    sites = {"hook_point": "blocks.1.mlp.hook_in", "hook_point_out": SITE}
    sae = Transcoder.Config(d_in=128, d_sae=64, **sites).build(seed=1).eval()
    report = feature_report(model, sae, 5, TEXTS, k=2)
    assert report.about["site_out"] == SITE
    assert report.n_active
    assert report.loss != report.loss_ablated


def test_a_site_that_is_not_in_the_stream_has_no_logit_effects(model: HookedTransformer) -> None:
    width = model.cfg.d_mlp
    sae = SAE.Config(d_in=width, d_sae=8).build().eval()
    report = feature_report(model, sae, 1, TEXTS, site=("post", 1))
    assert report.tables["promoted"] == []
    with pytest.raises(ValueError, match="names no site"):
        feature_report(model, sae, 1, TEXTS)


def test_a_trained_dictionary_is_not_the_dictionary(model: HookedTransformer, sae: SAE) -> None:
    trained: Any = SimpleNamespace(sae=sae)
    with pytest.raises(TypeError, match=r"a SimpleNamespace has no encode; give its \.sae"):
        max_activating_examples(model, TEXTS, sae=trained, feature=3)
    with pytest.raises(TypeError, match=r"give its \.sae"):
        site_read(trained, SITE)
    assert site_read(sae, None) == SITE


FEATURE_FIELDS = {
    "feature_index", "neuron_alignment_indices", "neuron_alignment_values", "neuron_alignment_l1", "correlated_neurons_indices",
    "correlated_neurons_l1", "correlated_neurons_pearson", "correlated_features_indices", "correlated_features_l1",
    "correlated_features_pearson", "neg_str", "neg_values", "pos_str", "pos_values", "frac_nonzero", "freq_hist_data_bar_values",
    "freq_hist_data_bar_heights", "logits_hist_data_bar_heights", "logits_hist_data_bar_values", "n_prompts_total",
    "n_tokens_in_prompt", "dataset", "decoder_weights_dist", "activations",
}  # fmt: skip


def test_dashboards_have_the_fields_of_the_layout(
    model: HookedTransformer, sae: SAE, feature: int, tmp_path: Path
) -> None:
    report = feature_report(model, sae, feature, TEXTS)
    names = {"model_id": "demo", "layer": 1, "sae_set": "mlp-topk"}
    path = write_dashboards([report], tmp_path / "batch-0.json", prompts="sentences", **names)
    content = json.loads(path.read_text())
    for given in ({"prompts": TEXTS}, {"layer": (1, 2)}, {"model_id": None}):
        with pytest.raises(TypeError, match=f"{next(iter(given))} must be an? "):
            unwrap(write_dashboards)(report, tmp_path / "none.json", **{**names, **given})
    with pytest.raises(TypeError, match="reports must be FeatureReports"):
        unwrap(write_dashboards)([report, 3], tmp_path / "none.json", **names)
    assert not (tmp_path / "none.json").exists()
    assert write_dashboards(report, tmp_path / "one.json", prompts="sentences", **names).read_text() == path.read_text()
    [found] = content.pop("features")
    assert content == names
    assert set(found) == FEATURE_FIELDS
    assert found["feature_index"] == feature
    assert found["frac_nonzero"] == report.density
    assert sum(found["freq_hist_data_bar_heights"]) == report.n_active
    assert len(found["freq_hist_data_bar_values"]) == len(found["freq_hist_data_bar_heights"])
    assert sum(found["logits_hist_data_bar_heights"]) == model.cfg.d_vocab
    assert found["pos_str"] == [token for token, _ in report.tables["promoted"]]
    for shown, values in zip(found["activations"], report.examples.activations, strict=True):
        assert set(shown) == {"bin_min", "bin_max", "bin_contains", "tokens", "values"}
        assert len(shown["tokens"]) == len(shown["values"])
        assert_near(
            max(shown["values"]), float(values.nan_to_num(0).max()), 6e-4, "numbers are written with three decimals"
        )
