"""Only the logits that a metric reads are computed; the scores are right for any metric."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from hooked_lm import HookedTransformer
from hooked_lm.engine.metric_trace import EVERYTHING, TracedAccess, UntracedAccess, entries_of, partial_logits, reads_of
from hooked_lm.patching import Edit, Experiment
from tests.close import assert_close
from tests.engine.naive import naive
from tests.models.toys import toy

BATCH, POS, VOCAB = 2, 5, 11
ROWS = torch.arange(BATCH)


def annotated(logits: Float[Tensor, "batch pos d_vocab"]) -> Float[Tensor, " batch"]:
    return logits[:, -1, 4]


def a_row_at_a_time(logits: Tensor) -> Tensor:
    return torch.stack([row[-1, 2] for row in logits])


def of_a_view(logits: Tensor) -> Tensor:
    return logits.view(BATCH, -1)[:, 7]


# metric -> the positions and the tokens that it reads; None: all
READ: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...] | None, tuple[int, ...] | None]] = {
    "one logit": (lambda x: x[0, -1, 3], (4,), (3,)),
    "a difference": (lambda x: x[0, -1, 3] - x[0, -1, -1], (4,), (3, 10)),
    "several positions": (lambda x: x[:, 1, 3] - x[:, -2, 3], (1, 3), (3,)),
    "all tokens of the last": (lambda x: x[:, -1].softmax(-1)[:, 2], (4,), None),
    "gathered": (lambda x: x[:, -1, :].gather(1, ROWS[:, None])[:, 0], (4,), None),
    "answers of each prompt": (lambda x: x[ROWS, -1, torch.tensor([3, 8])], (4,), (3, 8)),
    "places of each prompt": (lambda x: x[range(2), [1, 2], torch.tensor([3, 4])], (1, 2), (3, 4)),
    "negative tensors": (lambda x: x[ROWS, torch.tensor([-1, -2])].logsumexp(-1), (3, 4), None),
    "a list of tokens": (lambda x: x[0, -1, [1, 5]].sum(), (4,), (1, 5)),
    "an ellipsis": (lambda x: x[..., 1].sum(1), None, (1,)),
    "slices": (lambda x: x[:, 1:3, 2:5].sum((1, 2)), (1, 2), (2, 3, 4)),
    "a slice with steps": (lambda x: x[:, ::2, 3].sum(1), (0, 2, 4), (3,)),
    "a slice beside a number": (lambda x: x[:, 1:3, 2].sum(1) + x[:, 4, 3], (1, 2, 4), (2, 3)),
    "a 0-d tensor": (lambda x: x[:, torch.tensor(2), 6], (2,), (6,)),
    "shapes alone, then one": (lambda x: x[:, x.shape[1] - 1, x.size(-1) - 1] * len(x), (4,), (10,)),
    "a float": (lambda x: float(x[0, -1, 2]), (4,), (2,)),
    "an int": (lambda x: int(x[0, -1].argmax()), (4,), None),
    "numpy": (lambda x: x[:, -1, 2].numpy(), (4,), (2,)),
    "a list": (lambda x: x[:, -1, 2].tolist(), (4,), (2,)),
    "with annotations": (annotated, (4,), (4,)),
    "prompt by prompt": (lambda x: x[0][-1][3], None, None),
    "an iterator": (a_row_at_a_time, None, None),
    "a view": (of_a_view, None, None),
    "a new axis": (lambda x: x[:, None, -1, 3].sum(1), None, None),
    "a mask": (lambda x: x[torch.ones(BATCH, POS, dtype=torch.bool)].sum(), None, None),
    "a mask of tokens": (lambda x: x[:, -1, torch.arange(VOCAB) < 3].sum(-1), None, None),
    "numpy indices": (lambda x: x[:, np.array([1, 2]), np.int64(3)].sum(1), None, None),
    "nested lists": (lambda x: x[:, [[1, 2], [3, 4]], 0].sum((1, 2)), None, None),
    "the whole": (lambda x: x.log_softmax(-1)[:, -1, 2], None, None),
    "a loss": (lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), torch.zeros(8).long()), (0, 1, 2, 3), None),
    "nothing": (lambda x: x[:, 3:3].sum((1, 2)), None, None),
    "nothing and something": (lambda x: x[:, 5:].sum((1, 2)) + x[:, 1, 2], (1,), None),
    "no logits at all": (lambda x: torch.ones(x.shape[0]), None, None),
    "the maximum": (lambda x: x.amax(-1).mean(), None, None),
    "all as numpy": (lambda x: np.asarray(x)[:, -1, 2], None, None),
}


def some_logits(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, POS, VOCAB, generator=torch.Generator().manual_seed(seed))


def compact(logits: Tensor, reads: TracedAccess) -> Tensor:
    """The part of the logits that `reads` selects."""
    some = logits if reads.positions is None else logits[:, list(reads.positions)]
    return some if reads.tokens is None else some[:, :, list(reads.tokens)]


@pytest.mark.parametrize("name", READ)
def test_the_traced_logits_suffice(name: str) -> None:
    metric, positions, tokens = READ[name]
    reads, [value] = reads_of([metric], some_logits())
    assert reads == TracedAccess(positions, tokens)
    other = some_logits(1)
    for logits, expected in ((some_logits(), value), (other, metric(other))):
        found = metric(partial_logits(compact(logits, reads), reads, logits.shape))
        assert_close(torch.as_tensor(found), torch.as_tensor(expected))


def test_several_metrics_read_what_each_of_them_reads() -> None:
    reads, _ = reads_of([READ["one logit"][0], READ["slices"][0]], some_logits())
    assert reads == TracedAccess((1, 2, 4), (2, 3, 4))
    assert reads_of([READ["one logit"][0], READ["the whole"][0]], some_logits())[0] == EVERYTHING


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x[0, 2],
        lambda x: x[:, -1, 4],
        lambda x: x[:, -1],
        lambda x: x[:, 1:, 3],
        lambda x: x.sum(),
        lambda x: x + 1,
        lambda x: 2.0 * x,
        lambda x: torch.stack([x, x]),
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: [*x],
        lambda x: x[x > 0],
        lambda x: x.clone(),
        lambda x: x.add_(1),
        lambda x: x.__setitem__((0, 0, 0), 1.0),
        lambda x: F.log_softmax(x, -1),
    ],
)
def test_untraced_access_is_raised(asks: Callable[[Tensor], Any]) -> None:
    reads = TracedAccess((1, 4), (3, 5))
    there = partial_logits(compact(some_logits(), reads), reads, some_logits().shape)
    with pytest.raises(UntracedAccess):
        asks(there)
    assert torch.equal(there[:, -1, 3], some_logits()[:, -1, 3])
    assert "(2, 5, 11)" in repr(there)


def test_entries_of_an_index() -> None:
    assert entries_of(slice(None), 4) is None
    assert entries_of(slice(-2, None), 4) == (2, 3)
    assert entries_of(torch.tensor([[3, 0], [-1, 1]]), 4) == (0, 1, 3)


# ---- in a sweep ------------------------------------------------------------------------------------------------------


class Sweep:
    """A toy, two runs, and cells in every layer, some after the positions that are read."""

    def __init__(self) -> None:
        self.model: HookedTransformer = toy(d_vocab=VOCAB)
        self.tokens, others = torch.randint(VOCAB, (2, BATCH, POS), generator=torch.Generator().manual_seed(2))
        _, cache = self.model.run_with_cache(others)
        sites = ["blocks.0.hook_resid_pre", "blocks.1.attn.hook_z", "blocks.2.hook_mlp_out"]
        self.cells = [[Edit(site, cache[site], (pos,))] for site in sites for pos in range(POS)]
        self.logits = [naive(self.model, self.tokens, cell) for cell in self.cells]

    def scores(self, *metrics: Callable[[Tensor], Any]) -> list[Tensor]:
        """Of each cell, [metric, prompt]."""
        found = dict(Experiment(self.model, self.tokens, metrics).run(self.cells, progress=False))
        assert sorted(found) == list(range(len(self.cells)))
        return [found[index] for index in range(len(self.cells))]

    def is_sound(self) -> bool:
        """No hook is left, and the model says what it said."""
        free = not any(point._hooks for point in self.model.hook_points())
        return free and torch.equal(self.model(self.tokens), self.expected)

    @property
    def expected(self) -> Tensor:
        return toy(d_vocab=VOCAB)(self.tokens)


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return Sweep()


def same(found: list[Tensor], expected: list[Any], scale: float | None = None) -> None:
    for one, other in zip(found, expected, strict=True):
        other = torch.as_tensor(other).to(torch.float32).reshape(-1)
        assert_close(one[0], other, scale=scale)


@pytest.mark.parametrize("name", READ)
def test_every_metric_in_a_sweep(sweep: Sweep, name: str) -> None:
    metric = READ[name][0]
    largest = max(float(logits.abs().max()) for logits in sweep.logits)  # a single logit may be small
    same(sweep.scores(metric), [metric(logits) for logits in sweep.logits], largest)


def where_the_first_points(logits: Tensor) -> Tensor:
    return logits[:, int(logits[0, -1].argmax()) % POS, 3]


def more_if_it_rose(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] + (logits[:, 1, 2] if logits[0, -1, 3] > -0.6 else 0)


def all_if_it_rose(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] if logits[0, -1, 3] < -0.6 else logits.logsumexp((1, 2))


def whatever_happens(logits: Tensor) -> Tensor:
    try:
        return logits[:, int(logits[0, -1].argmax()) % POS, 3]
    except Exception:
        return torch.full((BATCH,), -100.0)


@pytest.mark.parametrize("metric", [where_the_first_points, more_if_it_rose, all_if_it_rose, whatever_happens])
def test_metrics_that_read_other_logits_in_other_cells(sweep: Sweep, metric: Callable[[Tensor], Tensor]) -> None:
    base = sweep.model(sweep.tokens)
    reads = {reads_of([metric], logits)[0] for logits in [base, *sweep.logits]}
    assert len(reads) > 1, "the metric reads the same of all cells"
    same(sweep.scores(metric), [metric(logits) for logits in sweep.logits])


def subtracts(logits: Tensor) -> Tensor:
    return logits.sub_(logits.amax(-1, keepdim=True)).exp_()[:, -1, 3]


def writes_into_a_part(logits: Tensor) -> Tensor:
    last = logits[:, -1]
    last -= 5.0
    return last[:, 3]


def writes_into_a_part_of_all(logits: Tensor) -> Tensor:
    middle = logits[:, 2]
    middle *= 2.0
    return logits.mean((1, 2))


def sets(logits: Tensor) -> Tensor:
    logits[:, :, 3] = -1.0
    return logits[:, -1].logsumexp(-1)


@pytest.mark.parametrize("metric", [subtracts, writes_into_a_part, writes_into_a_part_of_all, sets])
def test_a_metric_may_write_into_the_logits(sweep: Sweep, metric: Callable[[Tensor], Tensor]) -> None:
    expected = [metric(logits.clone()) for logits in sweep.logits]
    same(sweep.scores(metric), expected)
    experiment = Experiment(sweep.model, sweep.tokens, [metric])
    for _ in range(2):
        found = dict(experiment.run(sweep.cells, progress=False))
        same([found[index] for index in range(len(sweep.cells))], expected)


@pytest.mark.parametrize("metric", [subtracts, writes_into_a_part, sets])
def test_a_metric_does_not_see_the_writes_of_another(sweep: Sweep, metric: Callable[[Tensor], Tensor]) -> None:
    def plain(logits: Tensor) -> Tensor:
        return logits[:, -1].softmax(-1)[:, 3] + logits[:, 2, 4]

    found = sweep.scores(metric, plain)
    same(found, [metric(logits.clone()) for logits in sweep.logits])
    same([scores[1:] for scores in found], [plain(logits) for logits in sweep.logits])


def test_a_number_for_all_beside_one_for_each_prompt(sweep: Sweep) -> None:
    found = sweep.scores(lambda x: x[:, -1, 3].mean(), lambda x: x[:, -1, 3])
    assert all(scores.shape == (2, BATCH) for scores in found)
    for scores, logits in zip(found, sweep.logits, strict=True):
        assert_close(scores[0], logits[:, -1, 3].mean().expand(BATCH))


def test_a_metric_may_be_nan_where_the_base_run_is_not(sweep: Sweep) -> None:
    base = sweep.model(sweep.tokens)[0, -1, 3].item()

    def root(logits: Tensor) -> Tensor:
        return (logits[0, -1, 3] - base + 1e-3).sqrt()

    found, expected = sweep.scores(root), [root(logits).item() for logits in sweep.logits]
    assert 0 < sum(value != value for value in expected) < len(expected)
    for scores, value in zip(found, expected, strict=True):
        assert math.isnan(scores[0, 0]) == math.isnan(value)
        if not math.isnan(value):
            assert_close(
                scores[0, 0] ** 2, value**2, scale=sweep.logits[0]
            )  # a root near zero is as inexact as it is steep


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            lambda x: x[:, -1],
            r"one for each of the 2 prompts, for logits \(2, 5, 11\), but returned a tensor \(2, 11\)",
        ),
        (lambda x: x[:, :, 1].mean(0), r"returned a tensor \(5,\)"),
        (lambda x: None, "returned a NoneType"),
        (lambda x: "much", "returned a str"),
        (lambda x: x[0, -1, 0] * torch.nan, "NaN"),
    ],
)
def test_metrics_of_a_wrong_shape_fail_before_the_sweep(sweep: Sweep, bad: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experiment(sweep.model, sweep.tokens, [bad])


@pytest.mark.parametrize("later", [lambda x: None, lambda x: x[:, -1], lambda x: x[:, :, 0].mean(0)])
def test_metrics_of_a_wrong_shape_in_a_cell(sweep: Sweep, later: Callable[[Tensor], Any]) -> None:
    calls: list[int] = []

    def metric(logits: Tensor) -> Any:
        calls.append(1)
        return logits[:, -1, 3] if len(calls) < 4 else later(logits)

    with pytest.raises(ValueError, match="must give one number"):
        sweep.scores(metric)
    assert sweep.is_sound()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, UntracedAccess])
@pytest.mark.parametrize("reads_all", [False, True])
def test_an_interrupted_sweep_leaves_nothing(sweep: Sweep, error: type[BaseException], reads_all: bool) -> None:
    calls: list[int] = []

    def metric(logits: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 6:
            raise error
        return logits.mean((1, 2)) if reads_all else logits[:, -1, 3]

    with pytest.raises(error):
        sweep.scores(metric)
    assert sweep.is_sound()


@pytest.mark.parametrize("n_done", [1, 7])
def test_an_unfinished_sweep_leaves_nothing(sweep: Sweep, n_done: int) -> None:
    running = Experiment(sweep.model, sweep.tokens, [lambda x: x[:, -1, 3]]).run(sweep.cells, progress=False)
    for _ in range(n_done):
        next(running)
    assert sweep.is_sound(), "a hook is open between two cells"
    running.close()
    assert sweep.is_sound()


def test_an_edit_that_fails_leaves_nothing(sweep: Sweep) -> None:
    def fails(value: Tensor) -> Tensor:
        raise RuntimeError("no")

    cells = [*sweep.cells, [Edit("blocks.1.attn.hook_pattern", fails, (3,))]]
    with pytest.raises(RuntimeError, match="no"):
        list(Experiment(sweep.model, sweep.tokens, [lambda x: x[:, -1, 3]]).run(cells, progress=False))
    assert sweep.is_sound()


def test_no_gradients(sweep: Sweep) -> None:
    """Even if the caller enables them, also between the cells."""
    model, seen = toy(d_vocab=VOCAB).requires_grad_(True), []

    def watched(logits: Tensor) -> Tensor:
        seen.append(logits.requires_grad or torch.is_grad_enabled())
        return logits[:, -1, 3]

    for _ in Experiment(model, sweep.tokens, [watched]).run(sweep.cells, progress=False):
        assert torch.is_grad_enabled()
    assert len(seen) > 1
    assert not any(seen)
