"""A norm changed together with copies of the stream that bypass its sites: whole forward passes, equal to a loop."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm.engine.edit import Edit
from hooked_lm.engine.experiment import Experiment
from tests.close import assert_apart, assert_close
from tests.engine.naive import naive
from tests.families import DECODER_CASES
from tests.families._models import hooked, prompt
from tests.models.toys import ids, toy
from tests.unchecked import unchecked

INPUTS = ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input")


@pytest.mark.parametrize("kind", ["standard", "rotary", "parallel"])
@pytest.mark.parametrize("flag", [False, True])
def test_both_in_one_cell_and_in_one_batch(kind: str, flag: bool) -> None:
    model, tokens = toy(kind, use_split_qkv_input=flag), ids(2, 8)
    _, other = toy(kind).run_with_cache(ids(2, 8, seed=1), names_filter=["*ln1*", *(f"*{site}" for site in INPUTS)])

    def edit(site: str, positions: Any = (3,)) -> Edit:
        return Edit(f"blocks.1.{site}", other[f"blocks.1.{site}"], positions)

    cells = [[edit(norm), edit(site)] for norm in ("ln1.hook_scale", "ln1.hook_normalized") for site in INPUTS]
    cells += [[edit("ln1.hook_normalized", None), edit("hook_q_input", None)], [edit("ln1.hook_scale")]]
    found: dict[int, Tensor] = {}

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 3] - logits[:, -1, 4]

    experiment = Experiment(model, tokens, [metric])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for index, scores in experiment.run(cells, progress=False):
            found[index] = scores[0]
    assert "a norm is changed together with copies" in str(said[0].message)
    with torch.no_grad():
        for index, cell in enumerate(cells):
            assert_close(found[index], metric(naive(model, tokens, cell)))


@pytest.mark.parametrize("site", INPUTS)
def test_both_in_the_base_run(site: str) -> None:
    """The base run is a whole forward pass, and so are the cells, whatever they change."""
    model, tokens = toy("standard"), ids(2, 8)
    sites = ["blocks.0.hook_mlp_out", "blocks.1.ln1.hook_normalized", f"blocks.1.{site}"]
    _, other = model.run_with_cache(ids(2, 8, seed=1), names_filter=sites)
    first, norm, copies = (Edit(site, other[site], (3,)) for site in sites)
    base, cells = [copies, norm], [[first], [Edit("blocks.1.hook_mlp_out", lambda x: 2.0 * x)]]

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 3] - logits[:, -1, 4]

    experiment = Experiment(model, tokens, [metric], base=base)
    assert_close(experiment.scores[0], metric(naive(model, tokens, base)))
    with pytest.warns(UserWarning, match="a norm is changed together with copies"):
        found = dict(experiment.run(cells, progress=False))
    for index, cell in enumerate(cells):
        assert_close(found[index][0], metric(naive(model, tokens, cell, base)))


@pytest.mark.parametrize("site", ["attn.hook_kv_latent", "attn.kv_norm.hook_scale", "attn.kv_norm.hook_normalized"])
@pytest.mark.parametrize("copies", ["hook_k_input", "hook_v_input"])
@torch.no_grad()
def test_what_keys_and_values_share_with_copies_for_one_of_them(site: str, copies: str) -> None:
    """Where keys have an input of their own, values have a latent of their own, whose sites no hook sees."""
    case = next(case for case in DECODER_CASES if case.family == "deepseek_v3")
    model, tokens = copy.deepcopy(hooked(case)).double(), prompt(case, batch=1)
    shared = Edit(f"blocks.0.{site}", lambda x: 0.5 * x + 0.3, (10,))
    cell = [Edit(f"blocks.0.{copies}", lambda x: 0.3 * x, (8,))]

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 3] - logits[:, -1, 4]

    scores = []
    for base, whole in (([shared], cell), ([], [shared, *cell])):
        experiment = Experiment(model, tokens, [metric], base=base)
        with unchecked(), pytest.warns(UserWarning, match="a norm is changed together with copies"):
            [(_, [score])] = experiment.run([whole], progress=False)
        assert_close(score, metric(naive(model, tokens, whole, base)), dtype=torch.float32)
        scores.append(score)
    assert_close(scores[0], scores[1])
    assert_apart(scores[0], metric(naive(model, tokens, cell)).float())
