"""The cost that a sweep reports equals counts by hand."""

import torch

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.engine.cost import token_cost
from hooked_lm.patching import Edit, Experiment
from tests.families import DECODER_CASES
from tests.families._models import hooked


def flops(model: HookedTransformer, n_pos: int, site: str, pos: int) -> tuple[int, int]:
    """Layer-rows and operations of one cell, whose metric reads one logit of the last position."""
    tokens = torch.arange(3, 3 + n_pos)[None]
    experiment = Experiment(model, tokens, [lambda logits: logits[:, -1, 5]])
    value = model.run_with_cache(tokens.flip(1))[1][site]
    list(experiment.run([[Edit(site, value, (pos,))]], progress=False))
    return experiment.cost.layer_rows, experiment.cost.flops


def test_a_decoder() -> None:
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_head": 4, "d_mlp": 16, "n_ctx": 8, "d_vocab": 20}
    model = HookedTransformer(HookedTransformerConfig(**sizes, act_fn="gelu", seed=0))
    keys, rest = 2 * 2 * 8 * 8, 2 * (2 * 8 * 8 + 2 * 8 * 16)
    looking = 2 * 2 * 8  # at one key: scores and mixing, all heads
    # position 3 of 5 is changed: 3 and 4 pass its layer, where only 3 has another key, and see all five keys; in the last
    # layer both have other keys, and only 4 a query
    own = keys + 2 * rest + 2 * 5 * looking
    last = 2 * keys + rest + 5 * looking
    assert flops(model, 5, "blocks.0.hook_resid_pre", 3) == (2 + 2, own + last + 2 * 8)


def test_the_rows_of_mixers_with_a_state() -> None:
    """In the last layer they read all positions from the first change on, though the metric reads only one."""
    model = hooked(next(case for case in DECODER_CASES if case.family == "mamba"))
    mixer = model.blocks[0].mixer
    each = 2 * sum(weight.numel() for weight in mixer.parameters() if weight.ndim >= 2)
    n_layers = model.cfg.n_layers
    assert flops(model, 6, "blocks.0.hook_resid_pre", 2) == (4 * n_layers, 4 * n_layers * each + 2 * model.cfg.d_model)


def test_only_the_experts_of_a_token_count() -> None:
    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "d_mlp": 16, "n_ctx": 8, "d_vocab": 20}
    experts = {"num_experts": 4, "experts_per_token": 2, "gated_mlp": True, "act_fn": "silu"}
    model = HookedTransformer(HookedTransformerConfig(**sizes, **experts, seed=0))
    assert token_cost(model.blocks[0]).rest == 2 * (8 * 4 + 2 * (3 * 8 * 16))
