"""Rows that join a layer after attention, and rows whose keys are those of the base run: what a loop gives, with less work."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.components.attention.differential import DifferenceNorm, DifferentialAttention
from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.components.blocks.one_sublayer import AttentionOnlyBlock
from hooked_lm.components.blocks.parallel import ParallelBlock, SharedNormBlock
from hooked_lm.components.blocks.post_norm import NormedResidualBlock, PostNormBlock
from hooked_lm.components.blocks.weighted import WeightedResidualBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.ssm.rg_lru import RGLRU
from hooked_lm.engine.metric_trace import EVERYTHING
from hooked_lm.engine.schedule import Planner
from hooked_lm.families.decoders.doge.value_mask import ValueMaskedAttention
from hooked_lm.families.decoders.jetmoe.routed import RoutedAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.patching import Edit, Experiment
from tests.close import assert_close
from tests.core import thinned
from tests.engine.naive import naive
from tests.engine.small import cached, ids
from tests.models.structures import D_MODEL, D_VOCAB, N_CTX, random_model

NORM, MLP = LayerNorm.Config(D_MODEL), GatedMLP.Config(D_MODEL, 10)
ATTN = Attention.Config(D_MODEL, 4, 4, n_key_value_heads=2, qkv_bias=True, rotary=Rotary(4))
BOTH = {"attn": ATTN, "ln1": NORM, "mlp": MLP, "ln2": NORM}
CORE_BLOCKS = ("pre-norm", "parallel", "mixer")
BLOCKS = {
    "pre-norm": PreNormBlock.Config(**BOTH, ln1_post=NORM, residual_scale=0.7),
    "parallel": ParallelBlock.Config(**BOTH),
    "shared norm": SharedNormBlock.Config(attn=ATTN, ln1=NORM, mlp=MLP),
    "post-norm": PostNormBlock.Config(**BOTH),
    "normed residuals": NormedResidualBlock.Config(**BOTH),
    "experts": PreNormBlock.Config(attn=ATTN, ln1=NORM, mlp=MoE.Config(MLP, 4, 2, SoftmaxRouter()), ln2=NORM),
    "attention only": AttentionOnlyBlock.Config(attn=ATTN, ln1=NORM),
    "gated attention": PreNormBlock.Config(**BOTH | {"attn": GatedAttention.Config(**vars(ATTN))}, residual_scale=0.7),
    "differential attention": PreNormBlock.Config(
        **BOTH | {"attn": DifferentialAttention.Config(**vars(ATTN) | {"z_norm": DifferenceNorm.Config(8, eps=0.1)})}
    ),
    "experts in attention": PreNormBlock.Config(
        **BOTH | {"attn": RoutedAttention.Config(**vars(ATTN), n_experts=2, top_k=1)}
    ),
    "weighted stream": WeightedResidualBlock.Config(
        **BOTH | {"attn": ValueMaskedAttention.Config(**vars(ATTN), keep=3)}
    ),
    "mixer": MixerMLPBlock.Config(
        mixer=RGLRU.Config(D_MODEL, d_inner=8, n_channel_groups=2), ln1=NORM, mlp=MLP, ln2=NORM
    ),
}
JOINS = {"attn.hook_z": "attn.hook_z", "attn.hook_result": "attn.hook_z", "ln1_post.hook_scale": "attn.hook_z"}
JOINS |= dict.fromkeys(["hook_attn_out", "hook_resid_mid", "mlp.hook_post", "hook_resid_post"], "hook_attn_out")
JOINS |= {"hook_mixer_out": "hook_mixer_out"}
N_POS = 6


def model_of(kind: str) -> HookedTransformer:
    unembed = Unembed.Config(D_MODEL, D_VOCAB)
    tree = DecoderConfig(N_CTX, Embed.Config(D_VOCAB, D_MODEL), (BLOCKS[kind],) * 3, unembed, ln_final=NORM)
    return random_model(tree, dtype=torch.float64).requires_grad_(False)


def everything(logits: Tensor) -> Tensor:
    return logits.square().mean((1, 2))


def last(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5]


def halved(value: Tensor) -> Tensor:
    return 0.5 * value


def joins(experiment: Experiment, edits: list[Edit]) -> str:
    """The site at which the cell joins its first layer."""
    assert experiment.base is not None
    planner = Planner(experiment.base, experiment.site_infos, EVERYTHING.interval(N_POS))
    return planner.schedule(0, edits).spans[0].entry_site.partition(".1.")[2]


def check(model: HookedTransformer, cells: list[list[Edit]], base: list[Edit], metric: Callable) -> Experiment:
    """All cells in one pass give what a loop gives."""
    tokens = ids(2, N_POS)
    sites = {edit.site for cell in cells for edit in cell}
    experiment = Experiment(model, tokens, [metric], base=base, compare=sites)
    assert experiment.fallback_reason is None
    for index, scores in experiment.run(cells, progress=False):
        expected = metric(naive(model, tokens, cells[index], base))
        assert (expected - metric(naive(model, tokens, [], base))).abs().max() > 1e-7, cells[index]
        assert_close(scores[0], expected, dtype=torch.float32)
    assert experiment.cost.forwards == 1
    return experiment


@pytest.mark.parametrize("kind", thinned(BLOCKS, keep=CORE_BLOCKS))
@pytest.mark.parametrize("metric", [everything, last])
def test_rows_join_after_attention(kind: str, metric: Callable) -> None:
    model = model_of(kind)
    values = cached(model, ids(2, N_POS, seed=1))
    sites = [site for site in JOINS if f"blocks.1.{site}" in model.all_points()]
    assert len(sites) >= 3
    values |= model.run_with_cache(ids(2, N_POS, seed=1), names_filter=[f"blocks.1.{site}" for site in sites])[1]
    cells = [
        [Edit(f"blocks.1.{site}", value if value is halved else values[f"blocks.1.{site}"], where)]
        for site in sites
        for value in (halved, values)
        for where in (None, (N_POS - 1,), (1, N_POS - 1))
    ]
    early = [Edit(f"blocks.{layer}.hook_resid_pre", values[f"blocks.{layer}.hook_resid_pre"], (2,)) for layer in (0, 1)]
    experiment = check(model, [*cells, *([edit] for edit in early)], [], metric)
    output = "hook_mixer_out" if kind == "mixer" else "hook_attn_out"
    for cell in cells:
        expected = JOINS[cell[0].site.partition(".1.")[2]]
        assert joins(experiment, cell) == (expected if expected == "attn.hook_z" else output), cell
        assert joins(experiment, [*cell, early[1]]) == ""


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "mixer"])
@pytest.mark.parametrize("metric", [everything, last])
def test_keys_of_the_same_layer_are_changed_too(kind: str, metric: Callable) -> None:
    """Then attention has to run, with keys of the changed tokens alone."""
    model = model_of(kind)
    keys = Edit("blocks.1.attn.hook_k", halved, (2,))
    outputs = [Edit(f"blocks.1.{site}", halved, (4,)) for site in ("attn.hook_z", "hook_attn_out", "hook_resid_post")]
    cells = [[keys], *([keys, edit] for edit in outputs), *([edit] for edit in outputs)]
    experiment = check(model, cells, [], metric)
    assert [joins(experiment, cell) for cell in cells[:4]] == [""] * 4


def test_rows_of_the_batch_are_changed_alone() -> None:
    model = model_of("pre-norm")
    values = cached(model, ids(2, N_POS, seed=1))
    site = "blocks.1.hook_resid_pre"
    cells = [[Edit(site, value, (2,), rows=rows)] for value in (halved, values[site]) for rows in ([1], slice(0, 1))]
    tokens, experiment = ids(2, N_POS), Experiment(model, ids(2, N_POS), [everything])
    for index, scores in experiment.run(cells, progress=False):
        assert_close(scores[0], everything(naive(model, tokens, cells[index], [])), dtype=torch.float32)


def test_an_edit_that_nobody_reads_leaves_a_later_one() -> None:
    model = model_of("pre-norm")
    unread = Edit("blocks.2.hook_mlp_out", halved, (2,))
    check(model, [[unread, Edit("ln_final.hook_normalized", halved, (N_POS - 1,))]], [], last)


@pytest.mark.parametrize("kind", thinned(BLOCKS, keep=CORE_BLOCKS))
@pytest.mark.parametrize("site", ["attn.hook_z", "attn.hook_q", "hook_attn_out", "hook_mixer_out", "hook_resid_post"])
def test_changes_of_the_base_run_are_made_once(kind: str, site: str) -> None:
    model, sites = model_of(kind), [site for site in JOINS if "result" not in site and "ln1" not in site]
    if f"blocks.1.{site}" not in model.all_points():
        site = "hook_resid_pre"
    there = [f"blocks.1.{name}" for name in sites if f"blocks.1.{name}" in model.all_points()]
    base = [Edit(f"blocks.1.{site}", halved, (1, N_POS - 1))]
    cells = [[Edit(name, halved, where)] for name in there for where in (None, (N_POS - 1,))]
    experiment = check(model, cells, base, everything)
    assert not any(joins(experiment, cell) == site for cell in cells)
