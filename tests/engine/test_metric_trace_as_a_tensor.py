"""Partial logits behave as a tensor: indices never wrap, and values that a metric writes are read back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hooked_lm import analysis, patching
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.engine.metric_trace import reads_of
from hooked_lm.patching import Edit, Experiment
from tests.close import GRADIENT, assert_close
from tests.engine.naive import naive
from tests.models.toys import toy

BATCH, POS, VOCAB = 2, 5, 11
MODEL = toy(d_vocab=VOCAB)
CLEAN, CORRUPTED = torch.randint(VOCAB, (2, BATCH, POS), generator=torch.Generator().manual_seed(2))

OUTSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "a position behind the last": lambda x: x[:, POS, 3],
    "a position before the first": lambda x: x[:, -POS - 1, 3],
    "a token behind the last": lambda x: x[:, -1, VOCAB],
    "a token before the first": lambda x: x[:, -1, -VOCAB - 1],
    "a prompt behind the last": lambda x: x[BATCH, -1, 3].expand(BATCH),
    "a list of positions": lambda x: x[:, [1, POS], 3].sum(1),
    "a list of tokens": lambda x: x[:, -1, [1, VOCAB]].sum(1),
    "a tensor of positions": lambda x: x[torch.arange(BATCH), torch.tensor([1, POS]), 3],
    "a tensor of tokens": lambda x: x[:, -1, torch.tensor([VOCAB, 1])].sum(1),
    "a tensor without axes": lambda x: x[:, torch.tensor(POS), 3],
    "one after an ellipsis": lambda x: x[..., VOCAB].sum(1),
    "a fourth axis": lambda x: x[:, -1, 3, 0],
    "of a part": lambda x: x[:, -1][:, VOCAB],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_out_of_range_is_refused_everywhere(name: str) -> None:
    metric = OUTSIDE[name]
    with pytest.raises(IndexError):
        metric(torch.zeros(BATCH, POS, VOCAB))
    for run in (patching.sweep, analysis.attribute):
        with pytest.raises(IndexError):
            run(MODEL, CORRUPTED, CLEAN, metric=metric, progress=False)
    with pytest.raises(IndexError):
        analysis.attribute_edges(MODEL, CORRUPTED, CLEAN, metric=metric)
    with pytest.raises(IndexError):
        Runner(MODEL, CORRUPTED, CLEAN, metric)


def test_a_step_backwards_is_refused_as_by_a_tensor() -> None:
    with pytest.raises(ValueError, match="step"):
        patching.sweep(MODEL, CORRUPTED, CLEAN, metric=lambda x: x[:, ::-1, 3][:, 0], progress=False)


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_out_of_range_in_a_cell_alone(name: str) -> None:
    calls: list[Tensor] = []

    def metric(logits: Tensor) -> Tensor:
        calls.append(logits)
        return logits[:, -1, 3] if len(calls) < 5 else OUTSIDE[name](logits)

    with pytest.raises(IndexError):
        patching.sweep(MODEL, CORRUPTED, CLEAN, metric=metric, progress=False)
    assert len(calls) >= 5


def test_a_metric_may_test_whether_a_position_exists() -> None:
    def metric(logits: Tensor) -> Tensor:
        try:
            return logits[:, POS, 3]
        except IndexError:
            return logits[:, -1, 4]

    found = patching.sweep(MODEL, CORRUPTED, CLEAN, metric=metric, progress=False)
    expected = patching.sweep(MODEL, CORRUPTED, CLEAN, metric=lambda x: x[:, -1, 4], progress=False)
    assert_close(found.values, expected.values)


@pytest.mark.parametrize("shape", [(3,), (4, 6), (2, 3, 4, 5)])
def test_logits_of_any_number_of_axes(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    _, [found] = reads_of([lambda x: x[0] + x[-1]], logits)
    assert torch.equal(found, logits[0] + logits[-1])
    with pytest.raises(IndexError):
        reads_of([lambda x: x[(0,) * (len(shape) + 1)]], logits)


# ---- writing ---------------------------------------------------------------------------------------------------------


def masks_a_view(x: Tensor) -> Tensor:
    last = x[:, -1]
    last[:, :8] = -torch.inf
    return x[:, -1].softmax(-1)[:, 9]


def adds_to_a_view(x: Tensor) -> Tensor:
    part = x[:, -1, 3]
    part += 5.0
    return x[:, -1, 3]


def fills_where(x: Tensor) -> Tensor:
    part = x[:, 1:3]
    part.masked_fill_(part > 0, -1.0)
    return x[:, 2].logsumexp(-1) + x[:, 1, 4]


def writes_out(x: Tensor) -> Tensor:
    part = x[:, -1]
    torch.mul(part, 2.0, out=part)
    return x[:, -1, 4]


def puts_by_index(x: Tensor) -> Tensor:
    part = x[:, -1]
    part.index_put_((torch.tensor([0, 1]), torch.tensor([3, 4])), torch.tensor([7.0, 8.0]))
    return x[:, -1, 3] - x[:, -1, 4]


def writes_into_a_view_of_a_view(x: Tensor) -> Tensor:
    x[:, 1:4][:, -1].T[2].mul_(3.0)
    return x[:, 3, 2]


def writes_by_numpy(x: Tensor) -> Tensor:
    part = x[:, -1].detach().numpy()
    np.multiply(part, -2.0, out=part)
    return x[:, -1, 5]


def writes_into_a_copy(x: Tensor) -> Tensor:
    part = x[:, [3, 4]]
    part.zero_()
    return x[:, -1, 5]


def writes_and_reads_elsewhere(x: Tensor) -> Tensor:
    first = x[0]
    first[-1, 4] = 2.0
    return x[:, -1, 4]


def writes_into_the_whole(x: Tensor) -> Tensor:
    x[:, -1, :10] = -torch.inf
    return x[:, -1].logsumexp(-1)


def checks_what_it_wrote(x: Tensor) -> Tensor:
    x[:, -1].zero_()
    if bool(x[:, -1].any()):
        raise ValueError("it is not there")
    return x[:, -2, 1] + x[:, -1, 1]


def reads_by_what_it_wrote(x: Tensor) -> Tensor:
    last = x[:, -1]
    last[:, 7] = 100.0
    return x[:, int(x[:, -1].argmax(-1)[0]) % POS, 3]


WRITING = [
    masks_a_view, adds_to_a_view, fills_where, writes_out, puts_by_index, writes_into_a_view_of_a_view, writes_by_numpy,
    writes_into_a_copy, writes_and_reads_elsewhere, writes_into_the_whole, checks_what_it_wrote, reads_by_what_it_wrote,
]  # fmt: skip


@pytest.mark.parametrize("metric", WRITING)
def test_writes_are_read_back_in_base_run_and_cells(metric: Callable[[Tensor], Tensor]) -> None:
    _, cache = MODEL.run_with_cache(CLEAN)
    cells = [[Edit(site, cache[site], (pos,))] for site in ("blocks.0.hook_resid_pre", "blocks.2.hook_mlp_out")
             for pos in (1, 3, 4)]  # fmt: skip
    experiment = Experiment(MODEL, CORRUPTED, [metric, lambda x: x[:, -1, 5]])
    found = dict(experiment.run(cells, progress=False))
    for scores, logits in [(experiment.scores, MODEL(CORRUPTED)), *(
        (found[i], naive(MODEL, CORRUPTED, cell)) for i, cell in enumerate(cells)
    )]:  # fmt: skip
        assert_close(scores[0], metric(logits.clone()))
        assert_close(scores[1], logits[:, -1, 5])


@pytest.mark.parametrize("metric", [adds_to_a_view, masks_a_view, writes_into_the_whole])
def test_gradients_of_written_values(metric: Callable[[Tensor], Tensor]) -> None:
    site = "blocks.1.hook_resid_pre"
    found = analysis.attribution.gradients.gradients(MODEL, CORRUPTED, [site], metric)
    kept: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> Tensor:
        kept["value"] = value.detach().requires_grad_()
        return kept["value"].clone()

    with torch.enable_grad():
        scores = metric(MODEL.run_with_hooks(CORRUPTED, fwd_hooks=[(site, keep)]).clone())
        [expected] = torch.autograd.grad(scores.sum(), [kept["value"]])
    assert_close(found.scores, scores.detach())
    assert_close(found.gradients[site], expected, depth=GRADIENT)


def test_untraced_access_is_noticed_even_if_the_metric_catches_it() -> None:
    """A bare `except` in a metric does not yield a wrong number."""
    calls: list[int] = []

    def metric(logits: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) < 4:
            return logits[:, -1, 3]
        try:
            return logits[:, 1, 3]
        except BaseException:
            return torch.full((BATCH,), -100.0)

    found = patching.sweep(MODEL, CORRUPTED, CLEAN, metric=metric, progress=False)
    assert not bool((found.values == -100).any())
