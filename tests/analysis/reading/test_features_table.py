"""The table of all features, the pages that it links, and the features of a prompt, against the model run by hand."""

import re
from inspect import unwrap
from pathlib import Path

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.analysis import FeaturesTable, feature_report, features_table, metrics, top_features
from hooked_lm.interventions.dictionaries import SAE, Dictionary, TopK, Transcoder, load
from tests.close import assert_close, assert_equal, assert_near

SITE = "blocks.1.hook_resid_post"
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
    return load("demo")


@pytest.fixture(scope="module")
def table(model: HookedTransformer, sae: SAE) -> FeaturesTable:
    return features_table(model, sae, TEXTS, ablate=2, skip=1, batch_size=3)


@pytest.mark.slow
def test_the_numbers_are_those_of_the_model_run_by_hand(
    model: HookedTransformer, sae: SAE, table: FeaturesTable
) -> None:
    with torch.no_grad():
        runs = [model.run_with_cache(text, names_filter=SITE)[1][SITE] for text in TEXTS]
        features = torch.cat([sae.encode(value)[0, 1:] for value in runs])
    assert_close(table.columns["density"], (features != 0).float().mean(0))
    assert_close(table.columns["largest"], features.amax(0), depth=3)
    tokens = [token for text in TEXTS for token in model.to_str_tokens(text)[1:]]
    for feature in table.top(5, by="largest")["feature"]:
        assert table.tokens[feature][0] == tokens[int(features[:, feature].argmax())]
        assert len(table.tokens[feature]) == len(set(table.tokens[feature])) <= 3
    never = int((features == 0).all(0).nonzero()[0])
    assert table.tokens[never] == []


def test_numbers_that_are_not_there_are_not_shown(model: HookedTransformer, sae: SAE, tmp_path: Path) -> None:
    without = features_table(model, sae, TEXTS[:1], ablate=0)
    assert list(without.to_dataframe()) == ["feature", "density", "largest", "tokens"]
    with pytest.raises(ValueError, match="there is no column 'loss'"):
        without.top(by="loss")
    reports = feature_report(model, sae, [61], TEXTS[:1])
    some = features_table(model, sae, TEXTS[:1], ablate=1)
    page = some.write_pages(reports, tmp_path).read_text("utf-8")
    assert page.count('<td data-value="nan"></td>') == 511
    assert "no value" not in page


def test_losses_are_those_of_reports(model: HookedTransformer, sae: SAE, table: FeaturesTable) -> None:
    ablated = table.top(9, by="loss")
    assert len(ablated) == 2
    densest = table.columns["density"].topk(2).values.tolist()
    assert_close(sorted(ablated["density"], reverse=True), densest)
    reports = feature_report(model, sae, ablated["feature"].tolist(), TEXTS, skip=1)
    for report, row in zip(reports, ablated.itertuples(), strict=True):
        assert_close(torch.tensor(report.loss_ablated - report.loss), torch.tensor(row.loss), scale=1.0)
        assert_close(report.density, row.density)
        alone = feature_report(model, sae, row.feature, TEXTS, skip=1)
        assert alone.tables.keys() == report.tables.keys()
        assert_close(torch.tensor(alone.loss_ablated), torch.tensor(report.loss_ablated), depth=10)
    chosen = features_table(model, sae, TEXTS[:2], ablate=[7, -1])
    assert chosen.columns["loss"].isnan().sum() >= len(chosen) - 2
    with pytest.raises(IndexError, match="feature 512 is out of range"):
        features_table(model, sae, TEXTS, ablate=[512])
    with pytest.raises(ValueError, match="no column 'size'"):
        table.top(3, by="size")


def test_pages_are_linked_and_load_nothing(
    model: HookedTransformer, sae: SAE, table: FeaturesTable, tmp_path: Path
) -> None:
    reports = feature_report(model, sae, [61, 7, 300], [*TEXTS, "<script>alert(1)</script> is"], n_examples=3)
    index = table.write_pages(reports, tmp_path / "pages")
    files = {file.name for file in index.parent.iterdir()}
    assert files == {"index.html", "feature-61.html", "feature-7.html", "feature-300.html"}
    links = {file: set(re.findall('href="([^"]*)"', (index.parent / file).read_text("utf-8"))) for file in files}
    assert links["index.html"] == files - {"index.html"}
    assert {"index.html", "feature-61.html", "feature-300.html"} <= links["feature-7.html"]
    first = (index.parent / "feature-61.html").read_text("utf-8")
    assert 'rel="next" href="feature-7.html"' in first
    assert 'rel="prev"' not in first
    for file in files:
        page = (index.parent / file).read_text("utf-8")
        assert "<script>alert" not in page
        assert not re.search("""(src|href)=["'](http|//)""", page)
    assert index.read_text("utf-8").count("<tr>") == len(table) + 1
    with pytest.raises(ValueError, match="no reports"):
        table.write_pages([], tmp_path)
    other = feature_report(model, TopK.Config(d_in=128, d_sae=8, k=2).build(), 1, TEXTS, site=("mlp_out", 0))
    with pytest.raises(ValueError, match=r"of the site 'blocks.0.hook_mlp_out', the table of 'blocks.1"):
        table.write_pages([other], tmp_path)


def test_neighbours_are_the_closest_directions(model: HookedTransformer, sae: SAE) -> None:
    report = feature_report(model, sae, 61, TEXTS, k=3)
    W = sae.W_dec / sae.W_dec.norm(dim=1, keepdim=True)
    best = (W @ W[61]).sort(descending=True)
    assert [feature for feature, _ in report.neighbours] == best.indices[1:4].tolist()
    assert_close(torch.tensor([cosine for _, cosine in report.neighbours]), best.values[1:4])
    assert "Nearest features" in report.plot().to_html()


def test_reports_show_each_text_once(model: HookedTransformer, sae: SAE, table: FeaturesTable) -> None:
    densest = int(table.columns["density"].argmax())
    report = feature_report(model, sae, densest, TEXTS * 2, skip=1)
    texts = report.examples.texts.tolist()
    assert len(texts) == len(set(texts)) > 1
    with torch.no_grad():
        for text, value in zip(texts, report.examples.values, strict=True):
            run = model.run_with_cache((TEXTS * 2)[text], names_filter=SITE)[1][SITE]
            assert_close(value, sae.encode(run)[0, 1:, densest].max(), depth=3)
    assert_equal(report.examples.values, report.examples.values.sort(descending=True).values)


def test_features_of_a_prompt_and_what_they_contribute(model: HookedTransformer, sae: SAE) -> None:
    prompt, answers = "Tom left early because", (" he", " she")
    found = top_features(model, sae, prompt, answers=answers)
    with torch.no_grad():
        features = sae.encode(model.run_with_cache(prompt, names_filter=SITE)[1][SITE])[0, -1]
    assert_close(found.columns["activation"], features.sort(descending=True).values[: len(found)], depth=3)
    assert len(found) == int((features != 0).sum())
    score = metrics.logit_difference(*answers, model=model)
    assert_equal(top_features(model, sae, prompt, metric=score).columns["attribution"], found.columns["attribution"])
    with torch.no_grad():
        for feature, estimate in zip(found.features[:4].tolist(), found.columns["attribution"], strict=False):
            without = Dictionary(SITE, sae=sae, feature=feature, value=0, positions=[-1])
            exact = score(model(prompt)) - score(model.run_with_hooks(prompt, fwd_hooks=[without]))
            assert_near(estimate, exact[0], 0.3 * abs(exact[0]) + 0.1, "a gradient estimates a large change")
    first = top_features(model, sae, prompt, positions=1)
    assert list(first.columns) == ["activation"]
    assert first.about["position"] == 1
    with pytest.raises(IndexError, match="position 9 is out of range"):
        top_features(model, sae, prompt, positions=9)
    with pytest.raises(ValueError, match="describes one prompt, and 2 are given"):
        unwrap(top_features)(model, sae, [prompt, prompt])


def test_transcoders_have_tables_and_features(model: HookedTransformer) -> None:
    sites = {"hook_point": "blocks.1.mlp.hook_in", "hook_point_out": "blocks.1.hook_mlp_out"}
    sae = Transcoder.Config(d_in=128, d_sae=32, **sites).build(seed=1).eval()
    table = features_table(model, sae, TEXTS[:2], ablate=1)
    assert table.columns["loss"].isfinite().sum() == 1
    assert table.about["site_out"] == "blocks.1.hook_mlp_out"
    assert "attribution" in top_features(model, sae, TEXTS[1], answers=(" Paris", " Rome")).columns
