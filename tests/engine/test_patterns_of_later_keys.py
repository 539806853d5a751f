"""A changed pattern may attend to keys after its query: what a later position changes then reaches earlier ones."""

import pytest
import torch
from torch import Tensor

from hooked_lm.engine.edit import Edit
from hooked_lm.engine.experiment import Experiment
from tests.close import assert_apart, assert_close
from tests.engine.naive import naive
from tests.engine.test_shared_beginnings import POS, build, prompts

LATE = POS - 1


def first(logits: Tensor) -> Tensor:
    return logits[:, 0, 3] - logits[:, 0, 5]


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("in_base", [True, False])
def test_the_first_position_sees_a_change_of_a_later_one(layer: int, in_base: bool) -> None:
    model, (tokens, other) = build(), prompts()
    mlp_outs = [f"blocks.{layer}.hook_mlp_out" for layer in (0, 2)]
    backwards = Edit(f"blocks.{layer}.attn.hook_pattern", lambda pattern: pattern.flip(-1), (0,))
    with torch.no_grad():
        _, cache = model.run_with_cache(other)
        held = Experiment(model, tokens, [first], base=[backwards]).capture([], mlp_outs)[0]
    late = Edit(mlp_outs[0], cache[mlp_outs[0]], (LATE,))
    hold = Edit(mlp_outs[1], held[mlp_outs[1]])  # what the base run has there
    base, cells = (
        ([backwards], [[late], [late, hold]]) if in_base else ([], [[backwards, late], [backwards, late, hold]])
    )
    experiment = Experiment(model, tokens, [first], base=base, compare=mlp_outs)
    for index, scores in experiment.run(cells, progress=False):
        expected = first(naive(model, tokens, cells[index], base))
        assert_close(scores[0], expected)
        assert_apart(scores[0], first(naive(model, tokens, [backwards])))
    assert experiment.cost.forwards == 1
