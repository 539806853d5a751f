"""Prompts that begin alike: what a cell does not change is not computed, and the numbers are the same."""

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, patching
from tests.close import assert_apart, assert_close
from tests.engine.naive import naive

POS, FIRST = 6, 3


def build() -> HookedTransformer:
    sizes = {"n_layers": 3, "d_model": 16, "n_heads": 4, "n_ctx": 8, "d_vocab": 11, "act_fn": "gelu"}
    return HookedTransformer(HookedTransformerConfig(**sizes, seed=0, initializer_range=0.5))


def prompts() -> tuple[Tensor, Tensor]:
    corrupted, clean = torch.randint(0, 11, (2, 2, POS), generator=torch.Generator().manual_seed(1))
    clean[:, :FIRST] = corrupted[:, :FIRST]
    clean[:, FIRST] = (corrupted[:, FIRST] + 1) % 11
    return corrupted, clean


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5]


@pytest.mark.parametrize("arguments", [{"sites": "resid_pre"}, {"sites": "z", "heads": "each", "positions": None}])
def test_what_nothing_changes_costs_nothing(arguments: dict):
    model, (corrupted, clean) = build(), prompts()
    alike = patching.sweep(model, corrupted, clean, metric=metric, **arguments)
    cost = alike.cost["layer_rows"]
    _, cache = model.run_with_cache(clean)
    cells = {site: cache[site] + 1e-3 for site in cache}  # the same, but for values that differ everywhere
    apart = patching.sweep(model, corrupted, metric=metric, replace_with=cells, **arguments)
    assert cost < 0.75 * apart.cost["layer_rows"]
    if "heads" not in arguments:
        assert_close(alike.values[:, :FIRST], alike.corrupted.expand(3, FIRST, -1))
        assert_apart(alike.values[:, FIRST], alike.corrupted.expand(3, -1))


def test_also_several_edits_in_a_cell():
    model, (corrupted, clean) = build(), prompts()
    _, cache = model.run_with_cache(clean)
    _, held = model.run_with_cache(corrupted)
    hold = [patching.Edit(f"blocks.{layer}.hook_attn_out", held["attn_out", layer]) for layer in (1, 2)]
    send = patching.Edit("blocks.0.attn.hook_z", cache["z", 0], None, (1,))
    back = patching.Edit("blocks.0.hook_attn_out", held["attn_out", 0], (FIRST, FIRST + 1))
    cells = [[send], [send, *hold], [send, back], hold, [send, back, *hold]]
    sites = {edit.site for cell in cells for edit in cell}
    experiment = patching.Experiment(model, corrupted, [metric], compare=sites)
    found = dict(experiment.run(cells, progress=False))
    for index, cell in enumerate(cells):
        expected = metric(naive(model, corrupted, cell))
        assert_close(found[index][0], expected)
    assert_close(found[3], experiment.scores)
    assert_apart(found[1], experiment.scores)
