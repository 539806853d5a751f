"""A metric of all prompts on other rows of logits, against the metric of logits put together by hand; and that there is one."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hooked_lm.analysis import metrics
from hooked_lm.engine.metric_rows import MetricOfRows
from hooked_lm.engine.metric_trace import (
    EVERYTHING,
    Logits,
    TracedAccess,
    TracedLogits,
    UntracedAccess,
    reads_of,
    select_logits,
)
from tests.rounding import undisturbed

PACKAGE = Path(__file__).parents[2] / "hooked_lm"
N, N_POS, D_VOCAB = 4, 5, 7
GENERATOR = torch.Generator().manual_seed(0)
BASE, ROWS = torch.randn(2, N, N_POS, D_VOCAB, generator=GENERATOR)
RUNS = [[0, -1, -1, 2], [3, 3, 0, -1], [-1, -1, -1, -1]]
METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    "answers of each prompt": metrics.logit_difference([0, 1, 2, 3], [4, 5, 6, 0], [-1, 2]),
    "positions of each prompt": metrics.log_probability(3, torch.tensor([0, 1, -1, 2])),
    "another run": metrics.kl_divergence(BASE),
    "a function": lambda logits: logits[:, -1, 2] - logits[:, 1].mean(-1),
    "no index": lambda logits: logits.logsumexp(-1).mean(1),
}


def by_hand(run: list[int]) -> Tensor:
    return torch.stack([BASE[i] if row < 0 else ROWS[row] for i, row in enumerate(run)])


@pytest.mark.parametrize("name", METRICS)
def test_prompts_read_their_rows_and_others_the_base_run(name: str) -> None:
    metric = METRICS[name]
    whole = MetricOfRows(lambda logits: metric(logits).mean(), base=Logits.of(BASE))
    with undisturbed():  # an index of other strides may round otherwise
        found = MetricOfRows(metric, base=Logits.of(BASE))(ROWS, torch.tensor(RUNS))
        assert torch.equal(found, torch.stack([metric(by_hand(run)) for run in RUNS]))
        expected = torch.stack([metric(by_hand(run)).mean()[None] for run in RUNS])
        assert torch.equal(whole(ROWS, torch.tensor(RUNS)), expected)


def test_other_logits_than_before_are_computed_once_they_are_read() -> None:
    last, at = TracedAccess((N_POS - 1,), (2,)), [N_POS - 1]
    of_rows = MetricOfRows(lambda logits: logits[:, at[0], 2], last, Logits.of(BASE))
    rows = torch.tensor(RUNS)
    assert torch.equal(of_rows(ROWS, rows)[0], by_hand(RUNS[0])[:, -1, 2])
    assert of_rows.reads == last
    at[0] = 1
    assert torch.equal(of_rows(ROWS, rows)[1], by_hand(RUNS[1])[:, 1, 2])
    assert of_rows.reads == EVERYTHING
    at[0] = -1
    assert torch.equal(of_rows(ROWS, rows)[1], by_hand(RUNS[1])[:, -1, 2])


@pytest.mark.parametrize("positions", [None, (), (1, 4)])
@pytest.mark.parametrize("tokens", [None, (0,), (2, 3, 6)])
def test_logits_that_are_read(positions: tuple[int, ...] | None, tokens: tuple[int, ...] | None) -> None:
    rows = ROWS if positions is None else ROWS[:, list(positions)]
    expected = rows if tokens is None else rows[..., list(tokens)]
    assert torch.equal(select_logits(ROWS, TracedAccess(positions, tokens)), expected)


def test_logits_that_do_not_exist_are_asked_for() -> None:
    """The one who has computed some logits hears that others are read, and computes all."""
    partly = TracedLogits.over(ROWS.shape, ROWS, lambda index: raised())

    def raised() -> Tensor:
        raise UntracedAccess

    with pytest.raises(UntracedAccess):
        MetricOfRows(METRICS["a function"])(partly, torch.tensor([[0, 1, 2, 3]]))


def test_the_logits_of_rows_are_read_once_for_all_runs() -> None:
    taken = []

    def take(index: object) -> Tensor:
        taken.append(index)
        return ROWS[index]

    known, _ = reads_of([METRICS["a function"]], ROWS)
    MetricOfRows(METRICS["a function"], known)(
        TracedLogits.over(ROWS.shape, ROWS, take), torch.tensor([[0, 1, 2, 3]] * 3)
    )
    assert len(taken) == 1


def test_the_gradient_of_a_row_is_that_of_the_prompts_that_read_it() -> None:
    logits = ROWS.clone().requires_grad_()
    MetricOfRows(lambda logits: logits[:, -1, 2], base=Logits.of(BASE))(logits, torch.tensor(RUNS)).sum().backward()
    assert logits.grad is not None
    counts = [sum(run.count(row) for run in RUNS) for row in range(N)]
    assert logits.grad[:, -1, 2].tolist() == counts
    assert int(logits.grad.count_nonzero()) == len([count for count in counts if count])


def test_a_metric_may_change_its_logits() -> None:
    before = ROWS.clone()
    MetricOfRows(lambda logits: logits.mul_(2)[:, -1, 0])(ROWS, torch.tensor([[0, 1], [0, 1]]))
    assert torch.equal(ROWS, before)


@pytest.mark.parametrize("metric", [lambda logits: logits[:, -1], lambda logits: logits[:2, -1, 0]])
def test_other_numbers_than_one_for_each_prompt_are_refused(metric: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=f"one number, or one for each of the {N} prompts, got"):
        MetricOfRows(metric)(ROWS, torch.tensor([[0, 1, 2, 3]]))


# ---- there is one ----------------------------------------------------------------------------------------------------

PARTLY = {"TracedLogits", "UntracedAccess", "value_of", "partial_logits"}  # logits of which only some exist
KNOW_THEM = {
    "engine/metric_trace.py": "where they are made",
    "engine/experiment.py": "computes the logits of cells once more if a metric reads others",
    "analysis/attribution/gradients.py": "calls of torch functions on them",
    "engine/base_run.py": "computes those that are read",
}


def slices_of_metrics(source: str) -> Iterator[str]:
    """What a source does that `MetricOfRows` is for: to show a metric some rows of logits, or logits of which some exist."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "hooked_lm.engine.metric_trace":
            yield from (alias.name for alias in node.names if alias.name in PARTLY)
        if isinstance(node, ast.Subscript) and _is_metric(node.value):
            yield f"{ast.unparse(node)}: the numbers of some prompts"
        if _is_metric(node) and any(isinstance(each, ast.Subscript) or _is_cat(each) for each in node.args):
            yield f"{ast.unparse(node)}: the logits of some rows"
        if isinstance(node, ast.Subscript) and _reads(node.slice):
            yield f"{ast.unparse(node)}: an index of the logits that are read"


def _is_metric(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].strip("_") in ("metric", "metrics")


def _is_cat(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.cat", "torch.stack")


def _reads(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Attribute)
        and each.attr in ("positions", "tokens")
        and ast.unparse(each.value).endswith("reads")
        for each in ast.walk(node)
    )


def test_there_is_one_slice_of_a_metric() -> None:
    found = {
        str(file.relative_to(PACKAGE)): slices
        for file in sorted(PACKAGE.rglob("*.py"))
        if (slices := list(slices_of_metrics(file.read_text(encoding="utf-8"))))
    }
    assert found.keys() == KNOW_THEM.keys(), found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("scores = self.metric(logits[rows])", "self.metric(logits[rows]): the logits of some rows"),
        (
            "own = metric(torch.cat([base[:2], logits]))",
            "metric(torch.cat([base[:2], logits])): the logits of some rows",
        ),
        ("found = self.metric(whole)[rows]", "self.metric(whole)[rows]: the numbers of some prompts"),
        ("from hooked_lm.engine.metric_trace import Logits, value_of", "value_of"),
        (
            "own = logits[:, list(self.reads.positions)]",
            "logits[:, list(self.reads.positions)]: an index of the logits that are read",
        ),
        ("scores = metric(logits)\nsome = logits[rows]\nfound = metrics.logit(3)", None),
    ],
)
def test_a_second_slice_is_found(source: str, found: str | None) -> None:
    assert list(slices_of_metrics(source)) == ([] if found is None else [found])
