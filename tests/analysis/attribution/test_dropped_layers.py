"""The layer that AtP* drops has no gradient left but that of the stream, also where it adds more than attention and an MLP."""

import copy

import torch
from torch import Tensor

from hooked_lm.analysis.attribution.atp import Drop
from hooked_lm.hooks import HookPoint
from tests.close import assert_close
from tests.families import DECODER_CASES
from tests.families._models import hooked, prompt


def test_a_per_layer_embedding_is_dropped_with_its_layer() -> None:
    case = next(case for case in DECODER_CASES if case.family == "gemma4_text")
    model = copy.deepcopy(hooked(case)).double()
    last = model.cfg.n_layers - 1  # no other layer uses its keys
    drop, block = Drop(model), model.blocks[last]
    assert f"blocks.{last}.hook_per_layer_out" in drop.sites[last]
    values: dict[str, Tensor] = {}

    def keep(value: Tensor, point: HookPoint) -> Tensor:
        values[str(point.name)] = kept = value.view_as(value)
        return kept

    ends = [f"blocks.{last}.hook_resid_pre", f"blocks.{last}.hook_resid_post"]
    with model.hooks(fwd_hooks=[*drop.hooks(), *((site, keep) for site in ends)]):
        score = model(prompt(case))[0, -1, 3]
    of_layer = []
    for drop.layer in (None, last):
        before, after = torch.autograd.grad(score, [values[site] for site in ends], retain_graph=True)
        of_layer.append((before - after * block.scale).abs().max())
        if drop.layer == last:
            assert_close(before, after * block.scale)
    assert of_layer[0] > 1e-6
