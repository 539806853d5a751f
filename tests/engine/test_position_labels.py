"""Labels of positions over several prompts: tokens that all prompts share, and numbers where they differ."""

from pathlib import Path

import pytest

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis import logit_lens, metrics, source_attribution
from tests.close import assert_close

CLEAN = ["The capital of France is", "The capital of Italy is"]
CORRUPTED = ["The capital of Japan is", "The capital of Spain is"]
LABELS = ["0 <|endoftext|>", "1 The", "2  capital", "3  of", 4, "5  is"]
TITLE = "position (a number where the tokens of the prompts differ)"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def swept(model: HookedTransformer) -> patching.SweepResult:
    metric = metrics.logit_difference(model.to_tokens([" Paris", " Rome"], prepend_bos=False)[:, 0], 5)
    return patching.sweep(model, CORRUPTED, CLEAN, metric=metric, sites="resid_pre", layers=[0, 1], progress=False)


def test_no_result_labels_a_position_with_the_token_of_one_prompt_alone(
    model: HookedTransformer, swept: patching.SweepResult
) -> None:
    lens, sources = logit_lens(model, CLEAN), source_attribution(model, CLEAN, [" Paris", " Rome"], layers=[3])
    assert [list(each.axes["position"]) for each in (swept, lens, sources)] == [LABELS] * 3
    assert list(logit_lens(model, CLEAN[0]).axes["position"])[4] == "4  France"


def test_such_labels_are_selected_and_kept(swept: patching.SweepResult, tmp_path: Path) -> None:
    swept.save(tmp_path / "swept.safetensors")
    loaded = patching.SweepResult.load(tmp_path / "swept.safetensors")
    assert list(loaded.axes["position"]) == LABELS
    assert_close(swept.select(position=4).mean, swept.mean[:, 4])
    assert_close(swept.select(position=-2).mean, swept.mean[:, 4])
    assert_close(swept.select(position=" is").mean, swept.mean[:, 5])
    assert set(swept.to_dataframe()["position"]) == set(LABELS)


def test_figures_say_what_the_number_means(model: HookedTransformer, swept: patching.SweepResult) -> None:
    figure = swept.plot()
    assert figure.layout.xaxis.title.text == TITLE
    assert figure.layout.xaxis.ticktext == ("4 equal positions", "(4)", "·is")
    assert "tokens of the corrupted prompts" in figure.layout.title.subtitle.text
    assert swept.select(layer=0).plot().layout.xaxis.title.text == TITLE
    assert logit_lens(model, CLEAN).plot().layout.xaxis.title.text == TITLE
    assert logit_lens(model, CLEAN[0]).plot().layout.xaxis.title.text == "position"
