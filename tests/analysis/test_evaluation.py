"""`evaluate`: metrics for each prompt, with the interval that fits them."""

import torch

from hooked_lm.analysis import evaluate, metrics
from hooked_lm.results.bootstrap import bootstrap, wilson
from tests.close import assert_close
from tests.shown import model

PROMPTS = ["The capital of France is", "The capital of Italy is", "The capital of Spain is"]
ANSWERS = [[" Paris"], [" Rome"], [" Madrid"]]


def test_accuracies_have_wilsons_interval() -> None:
    both = {"right": metrics.accuracy(ANSWERS, model=model()), "logit": metrics.logit(ANSWERS, model=model())}
    found = evaluate(model(), PROMPTS, both)
    assert_close(
        torch.stack(found.interval()), torch.stack([torch.stack(_ends(found.values[i], i)) for i in (0, 1)], 1)
    )
    alone = evaluate(model(), PROMPTS, both["right"])
    assert_close(torch.stack(alone.interval()), torch.stack(wilson(found.values[0])))
    assert float(alone.interval()[0]) < 0.5 < float(alone.mean)
    for part in (alone, found.select(metric="right"), found.select(metric=["logit", "right"]).select(metric="right")):
        assert_close(part.top()["low"][0], float(wilson(found.values[0])[0]))
    assert_close(found.to_dataframe()["low"].tolist(), found.interval()[0])


def _ends(values: torch.Tensor, is_logit: int) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = bootstrap(values[None], 0.95, 1000, 0)
    return (low[0], high[0]) if is_logit else wilson(values)
