"""Values of cells at other sites: those of a loop, at every site of which the engine keeps values."""

import copy

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.engine.edit import Edit
from hooked_lm.engine.experiment import Experiment
from hooked_lm.hooks import HookPoint
from tests.close import assert_close
from tests.engine.naive import hook
from tests.families import DECODER_CASES, Case
from tests.families._models import hooked, prompt
from tests.unchecked import unchecked

FAMILIES = ("gpt_neox", "gemma4_text", "recurrent_gemma")
CASES = [next(case for case in DECODER_CASES if case.family == family) for family in FAMILIES]


def halved(value: Tensor) -> Tensor:
    return 0.5 * value


def read(model: HookedTransformer, tokens: Tensor, cell: list[Edit], sites: list[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(value: Tensor, point: HookPoint) -> None:
        found[point.name] = value.clone()

    hooks = [*((edit.site, hook(edit)) for edit in cell), *((site, keep) for site in sites)]
    with torch.no_grad(), unchecked():
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_captured_value_is_that_of_a_loop(case: Case) -> None:
    model, tokens = copy.deepcopy(hooked(case)).double(), prompt(case, batch=2)
    experiment = Experiment(model, tokens, [lambda logits: logits.mean((1, 2))])
    sites = [
        site
        for site, info in experiment.site_infos.items()
        if info.is_cheap_to_read and info.dims[:2] == ("batch", "pos")
    ]
    assert {"blocks.0.hook_resid_pre", "ln_final.hook_normalized"} <= {*sites}
    output = "hook_mixer_out" if "blocks.0.hook_mixer_out" in sites else "hook_attn_out"
    cells = [[Edit(f"blocks.{layer}.{name}", halved, (2,))] for layer in (0, 1) for name in ("hook_resid_pre", output)]
    cells = [cell for cell in cells if cell[0].site in sites]
    before = read(model, tokens, [], sites)
    expected = [read(model, tokens, cell, sites) for cell in cells]
    for layer in {experiment.site_infos[site].layer for site in sites}:  # how far a pass goes depends on the sites
        there = [site for site in sites if experiment.site_infos[site].layer == layer]
        base, found = experiment.capture(cells, there)
        for site in there:
            assert_close(base[site], before[site])
            for values, by_loop in zip(found, expected, strict=True):  # a value left out is that of the base run
                assert_close(values.get(site, base[site]), by_loop[site])
    last = experiment.capture(cells, ["ln_final.hook_normalized"])[1]
    assert all("ln_final.hook_normalized" in values for values in last)
