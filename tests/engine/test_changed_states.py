"""Functions of states after changes of the same states, in the base run or in a cell: equal to whole forward passes."""

import copy

import pytest
import torch
from torch import Tensor

from hooked_lm.engine.edit import Edit
from hooked_lm.engine.experiment import Experiment
from tests.close import assert_close
from tests.engine.naive import naive
from tests.families import DECODER_CASES, Case
from tests.families._models import hooked, prompt

CASES = [
    next(case for case in DECODER_CASES if case.family == family)
    for family in ("mamba", "mamba2", "recurrent_gemma", "qwen3_5_text")
]


def halved(*positions: int) -> tuple[str, tuple[int, ...]]:
    return "halved", positions


def zero(*positions: int) -> tuple[str, tuple[int, ...]]:
    return "zero", positions


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("base", "cell"),
    [
        ([halved(1, 2)], []),
        ([halved(1, 2)], [zero(6)]),
        ([halved(2)], [halved(4)]),
        ([zero(2)], [halved(4)]),
        ([zero(2), halved(4)], [zero(6)]),
        ([halved(4)], [halved(2)]),
        ([halved(4)], [zero(2)]),
        ([halved(4)], [zero(5)]),
        ([zero(2)], [zero(4)]),
        ([], [halved(1, 2, 5)]),
        ([], [zero(2), halved(4)]),
    ],
)
def test_a_function_is_given_the_states_that_follow_from_earlier_changes(case: Case, base: list, cell: list) -> None:
    """In the base run and in cells, which the engine continues from it."""
    model, tokens = copy.deepcopy(hooked(case)).double(), prompt(case, batch=2)
    site = next(name for name in model.all_points() if name.endswith("mixer.hook_state"))

    def edits(changes: list) -> list[Edit]:
        values = {"zero": torch.zeros(1, 1), "halved": lambda x: 0.5 * x}
        return [Edit(site, values[kind], positions) for kind, positions in changes]

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 3] - logits[:, -1, 4]

    experiment = Experiment(model, tokens, [metric], base=edits(base))
    assert_close(experiment.scores[0], metric(naive(model, tokens, [], edits(base))), dtype=torch.float32)
    [(_, scores)] = experiment.run([edits(cell)], progress=False) if cell else [(0, experiment.scores)]
    assert_close(scores[0], metric(naive(model, tokens, edits(cell), edits(base))), dtype=torch.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_function_of_the_last_layers_states_gets_all_of_them(case: Case) -> None:
    """Also those of positions that the metric does not read: later states follow from them."""
    model, tokens = copy.deepcopy(hooked(case)).double(), prompt(case, batch=2)
    site = [name for name in model.all_points() if name.endswith("mixer.hook_state")][-1]
    edit = Edit(site, lambda x: 0.5 * x)
    for read in (1, tokens.shape[1] - 1):

        def metric(logits: Tensor, read: int = read) -> Tensor:
            return logits[:, read, 3] - logits[:, read, 4]

        [(_, scores)] = Experiment(model, tokens, [metric]).run([[edit]], progress=False)
        assert_close(scores[0], metric(naive(model, tokens, [edit])), dtype=torch.float32)
