"""A metric on the scale of two runs is 0 in one and 1 in the other, and every tool takes it."""

from random import Random

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import attribute_edges, metrics, patch_edges
from hooked_lm.analysis.circuits import discover
from hooked_lm.analysis.metrics import faithfulness
from hooked_lm.demo.corpus import ioi_pairs
from hooked_lm.demo.experiment import prompt_pairs
from tests.close import assert_apart, assert_close
from tests.unchecked import unchecked

CLEAN, CORRUPTED, BETWEEN = torch.randn(3, 4, 2, 5, generator=torch.Generator().manual_seed(0))
DIFFERENCE = metrics.logit_difference(1, 2)


def scales(metric: metrics.Metric) -> dict[str, tuple[Tensor, Tensor]]:
    runs = metric(CLEAN), metric(CORRUPTED)
    return {"prompts": runs, "means": (runs[0].mean(), runs[1].mean())}


@pytest.mark.parametrize("metric", [DIFFERENCE, metrics.probability(3), metrics.log_probability([[1, 4]])])
def test_it_is_one_in_the_clean_run_and_zero_in_the_corrupted_one(metric: metrics.Metric) -> None:
    for name, (clean, corrupted) in scales(metric).items():
        restored = faithfulness(metric, clean, corrupted)
        ends = [restored(logits) if name == "prompts" else restored(logits).mean() for logits in (CLEAN, CORRUPTED)]
        assert_close(ends[0], torch.ones_like(ends[0]))
        assert_close(ends[1], torch.zeros_like(ends[1]), scale=1)
        assert_close(restored(BETWEEN), (metric(BETWEEN) - corrupted) / (clean - corrupted))
        assert restored.rises_with_answer


def test_a_loss_rises_too() -> None:
    text = torch.tensor([[1, 2]] * 4)
    loss = metrics.loss(text)
    restored = faithfulness(loss, loss(CLEAN), loss(CORRUPTED))
    assert_close(restored(CLEAN), torch.ones(4))
    assert (restored.rises_with_answer, loss.rises_with_answer) == (True, False)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def test_effects_are_shares_of_the_difference_of_each_prompt(model: HookedTransformer) -> None:
    pairs = prompt_pairs(4)
    clean, corrupted = ([getattr(pair, which) for pair in pairs] for which in ("clean", "corrupted"))
    answers = [pair.answer for pair in pairs], [pair.wrong_answer for pair in pairs]
    difference = metrics.logit_difference(*answers, model=model)
    runs = difference(model(clean)), difference(model(corrupted))
    for clean_value, corrupted_value in (runs, (runs[0].mean(), runs[1].mean())):
        restored = faithfulness(difference, clean_value, corrupted_value)
        edges = [("L1H7", "logits"), ("m0", "logits")]
        for tool, options in ((attribute_edges, {"check": False}), (patch_edges, {"edges": edges})):
            plain, scaled = (
                tool(model, corrupted, clean, metric=each, **options).effects().values.nan_to_num()
                for each in (difference, restored)
            )
            assert_close(scaled, plain / (clean_value - corrupted_value), scale=1)
            assert_apart(scaled, plain)


def test_a_scale_of_means_leaves_a_circuit_and_one_of_prompts_goes_with_those_of_a_search(
    model: HookedTransformer,
) -> None:
    rows = [row for row in ioi_pairs(Random(0), 60) if len(model.to_str_tokens(row[0])) == 15][:8]
    clean, corrupted, right, wrong = (list(column) for column in zip(*rows, strict=True))
    difference = metrics.logit_difference(right, wrong, model=model)
    runs = difference(model(clean)), difference(model(corrupted))
    by_means = faithfulness(difference, runs[0].mean(), runs[1].mean())
    search = {"method": "eap", "n_edges": 60, "check": False, "held_out": [0, 3, 5]}
    plain = discover(model, corrupted, clean, metric=difference, **search)
    assert bool((discover(model, corrupted, clean, metric=by_means, **search).edges == plain.edges).all())
    seen = [1, 2, 4, 6, 7]
    some = metrics.logit_difference([right[i] for i in seen], [wrong[i] for i in seen], model=model)
    texts = [[text[i] for i in seen] for text in (clean, corrupted)]
    alone = faithfulness(some, *(some(model(text)) for text in texts))
    expected = discover(model, texts[1], texts[0], metric=alone, method="eap", n_edges=60, check=False, held_out=0)
    found = discover(model, corrupted, clean, metric=faithfulness(difference, *runs), **search)
    assert bool((found.edges == expected.edges).all())
    assert found.about["metric"] == "faithfulness"


@pytest.mark.parametrize(
    ("clean", "corrupted", "message"),
    [
        (torch.ones(4), torch.tensor([0, 1, 2, 1.0]), r"no scale: the values of prompts \[1, 3\]"),
        (2.0, 2.0, "no scale: the values in the clean"),
        (float("nan"), 2.0, "finite"),
        (torch.ones(4), 0.0, r"got \[4\] and \[\]"),
        (torch.ones(2, 2), torch.zeros(2, 2), "one for each prompt"),
    ],
)
def test_what_is_no_scale_is_refused(clean: Tensor | float, corrupted: Tensor | float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        faithfulness(DIFFERENCE, clean, corrupted)


def test_what_does_not_fit_is_refused() -> None:
    with unchecked(), pytest.raises(TypeError, match="got function"):
        faithfulness(lambda logits: logits[:, -1, 0], 1.0, 0.0)  # type: ignore[arg-type]
    for_two = metrics.logit_difference([1, 2], [3, 4])
    with pytest.raises(ValueError, match="made for 2 prompts, and the values are of 4"):
        faithfulness(for_two, torch.ones(4), torch.zeros(4))
    restored = faithfulness(DIFFERENCE, torch.ones(4), torch.zeros(4))
    with pytest.raises(ValueError, match="was made for 4 prompts"):
        restored(CLEAN[:2])
