"""What is particular to Gemma 3n: several residual streams, of which a layer reads and writes one."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, pretrained
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.reading.lens import logit_lens
from hooked_lm.analysis.reading.neurons import neuron_top_tokens
from hooked_lm.analysis.reading.tuned_lens import train_tuned_lens
from hooked_lm.components.activations import GaussianTopK
from hooked_lm.families.decoders.gemma4_text.shared_kv import SharedKVAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.patching import Edit, Experiment, sweep
from tests.close import assert_apart, assert_close
from tests.engine.naive import naive
from tests.families import reference, streams
from tests.families._models import distance, every_block, hooked, logits_of, prompt, with_tree

CASES = {case.name: case for case in streams.CASES if case.family == "gemma3n_text"}
EVERYTHING, SECOND = CASES["everything"], CASES["second-stream-active-untied-silu"]
MODEL = hooked(EVERYTHING)


# ---- the comparison with transformers can fail -----------------------------------------------------------------------


def dense(block: Any) -> dict[str, Any]:
    act = block.mlp.act_fn
    return {"mlp": replace(block.mlp, act_fn=act.act_fn if isinstance(act, GaussianTopK.Config) else act)}


def from_the_first(block: Any) -> dict[str, Any]:
    shares = isinstance(block.attn, SharedKVAttention.Config) and block.attn.kv_source_layer == 2
    return {"attn": replace(block.attn, kv_source_layer=0) if shares else replace(block.attn)}


def first_keeps_kv(tree: DecoderConfig) -> DecoderConfig:
    blocks = every_block(from_the_first)(tree).blocks
    return replace(tree, blocks=(replace(blocks[0], attn=replace(blocks[0].attn, is_kv_source=True)), *blocks[1:]))


WRONG_TREES = {
    "all neurons": (EVERYTHING, every_block(dense)),
    "keys of another layer": (EVERYTHING, first_keeps_kv),
    "a gate of the unscaled stream": (EVERYTHING, every_block(lambda block: {"scales_gate": False})),
    "a gate of the scaled stream": (SECOND, every_block(lambda block: {"scales_gate": True})),
    "the first stream active": (SECOND, every_block(lambda block: {"altup": replace(block.altup, active=0)})),
    "a smaller eps of the router": (EVERYTHING, every_block(lambda block: {"altup": replace(block.altup, eps=1e-6)})),
    "another sparsity": (
        SECOND,
        every_block(lambda block: {"mlp": replace(block.mlp, act_fn=GaussianTopK.Config(0.5, "silu"))}),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    case, alter = WRONG_TREES[wrong]
    right, tokens = hooked(case), prompt(case)
    model = with_tree(right, alter(right.cfg.tree))
    assert distance(model(tokens), logits_of(case, tokens)) > 1e-3


def transposed(name: str, *axes: int) -> Callable[[HookedTransformer], None]:
    def damage(model: HookedTransformer) -> None:
        weight = model.get_parameter(name)
        weight.copy_(weight.transpose(*axes).clone())

    return damage


def zeroed(name: str) -> Callable[[HookedTransformer], None]:
    return lambda model: model.get_parameter(name).zero_()


DAMAGES = {
    "sources and targets": transposed("blocks.1.altup.W_predict", 1, 2),
    "gates and sources": transposed("blocks.1.altup.W_predict", 0, 2),
    "factors": transposed("blocks.1.altup.W_correct", 0, 1),
    "a projection of the embedding": transposed("blocks.0.split.W.1", 0, 1),
    "a projection before the norm": transposed("ln_final.W.0", 0, 1),
    "the last projection": zeroed("ln_final.W.2"),
    "no low-rank branch": zeroed("blocks.3.laurel.W_out"),
    "no norm of the branch": zeroed("blocks.3.laurel.norm.w"),
    "no router": zeroed("blocks.2.altup.w"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@torch.no_grad()
def test_wrong_weights_are_noticed(damage: str) -> None:
    model, tokens = copy.deepcopy(MODEL), prompt(EVERYTHING)
    DAMAGES[damage](model)
    assert distance(model(tokens), logits_of(EVERYTHING, tokens)) > 1e-3


@torch.no_grad()
def test_tokens_without_a_row_use_the_first() -> None:
    """In published checkpoints the vocabulary has more tokens than the per-layer embedding has rows."""
    tokens = torch.tensor([[60, 49, 50, 3]])
    _, cache = MODEL.run_with_cache(tokens)
    rows = MODEL.per_layer.rows(tokens)
    assert torch.equal(rows[:, 0], rows[:, 2])
    assert torch.equal(rows[:, 2], MODEL.per_layer.rows(torch.tensor([[0]]))[:, 0])
    assert_apart(rows[:, 1], rows[:, 2])
    assert_close(cache["per_layer.hook_out"], MODEL.per_layer(tokens, cache["hook_embed"]))


@torch.no_grad()
def test_few_neurons_are_active() -> None:
    act, x = GaussianTopK.Config(0.95, "relu").build(), torch.randn(3, 20_000)
    kept = (act(x) > 0).float().mean(-1)
    assert bool(((kept - 0.05).abs() < 0.01).all())
    assert bool((act(x + 7) > 0).eq(act(x) > 0).float().mean() > 0.999), "a cutoff above the mean, not above zero"


# ---- a run of some layers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=str)
@torch.no_grad()
def test_a_run_goes_on_with_all_streams(case: Any) -> None:
    model, tokens = hooked(case), prompt(case)
    whole, n = model(tokens), model.cfg.d_model * model.cfg.tree.ln_final.n_streams
    for layer in range(model.cfg.n_layers + 1):
        resid = model(tokens, stop_at_layer=layer)
        assert resid.shape[-1] == (n if layer else model.cfg.d_model)
        if all((block.attn.kv_source_layer or layer) >= layer for block in model.blocks[layer:]):
            assert torch.equal(model(resid, start_at_layer=layer, tokens=tokens), whole)


@torch.no_grad()
def test_one_stream_is_refused_where_all_are_read() -> None:
    tokens = prompt(EVERYTHING)
    _, cache = MODEL.run_with_cache(tokens)
    all_four = r"expected all 4 residual streams, \[batch, pos, 128\], as stop_at_layer returns them"
    for layer in (1, MODEL.cfg.n_layers):
        with pytest.raises(ValueError, match=all_four):
            MODEL(cache["resid_pre", 1], start_at_layer=layer, tokens=tokens)
    with pytest.raises(ValueError, match=r"expected a residual stream \[batch, pos, 32\]"):
        MODEL(torch.zeros(*tokens.shape, 64), start_at_layer=1, tokens=tokens)


def test_the_first_layers_alone() -> None:
    short = pretrained.from_pretrained_no_processing("tiny", hf_model=reference(EVERYTHING), first_n_layers=3)
    tokens = prompt(EVERYTHING)
    with torch.no_grad():
        assert torch.equal(short(tokens, stop_at_layer=3), MODEL(tokens, stop_at_layer=3))
        assert short.verify(tokens).ok
        assert short(tokens).shape == (*tokens.shape, short.cfg.d_vocab)


# ---- edits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [EVERYTHING, SECOND], ids=str)
@torch.no_grad()
def test_an_edit_of_one_stream_is_an_edit_of_all(case: Any) -> None:
    """The active stream, edited alone or among all, before a layer or after the one before."""
    model, tokens = hooked(case), prompt(case)
    active = model.cfg.tree.blocks[0].altup.active

    def one(value: Tensor, hook: Any) -> Tensor:
        return value * torch.linspace(0.5, 1.5, value.shape[-1])

    def among(value: Tensor, hook: Any) -> Tensor:
        value[:, :, active] = one(value[:, :, active], hook)
        return value

    edits = [("blocks.1.hook_resid_pre", one), ("blocks.0.hook_resid_post", one)]
    edits += [("blocks.1.hook_streams_pre", among), ("blocks.0.hook_streams_post", among)]
    found = [model.run_with_hooks(tokens, fwd_hooks=[edit]) for edit in edits]
    assert_apart(found[0], model(tokens))
    for other in found[1:]:
        assert_close(other, found[0])


@torch.no_grad()
def test_another_stream_matters_though_the_layer_does_not_read_it() -> None:
    tokens = prompt(EVERYTHING)

    def change(value: Tensor, hook: Any) -> Tensor:
        value[:, :, 3] *= torch.linspace(0.5, 1.5, value.shape[-1])
        return value

    with MODEL.hooks([("blocks.4.hook_corrected", change)]):
        logits, cache = MODEL.run_with_cache(tokens)
    _, clean = MODEL.run_with_cache(tokens)
    assert torch.equal(cache["resid_post", 4], clean["resid_post", 4])
    assert_apart(logits, MODEL(tokens))


@torch.no_grad()
def test_patching_all_streams_at_all_positions_gives_the_other_run() -> None:
    clean, corrupted = prompt(EVERYTHING), prompt(EVERYTHING, batch=3).flip(0).roll(1, 1)
    _, cache = MODEL.run_with_cache(clean)
    last = MODEL.cfg.n_layers - 1

    def put(value: Tensor, hook: Any) -> Tensor:
        return cache[hook.name]

    site = f"blocks.{last}.hook_streams_post"
    assert_close(MODEL.run_with_hooks(corrupted, fwd_hooks=[(site, put)]), MODEL(clean))
    one = f"blocks.{last}.hook_resid_post"
    assert_apart(MODEL.run_with_hooks(corrupted, fwd_hooks=[(one, put)]), MODEL(clean))


@torch.no_grad()
def test_sweeps_take_the_incremental_path() -> None:
    """They are exact at every site (see `test_exact_families`), here without a whole forward pass and without a warning."""
    tokens, other = prompt(EVERYTHING, batch=2), prompt(EVERYTHING, batch=4)[2:]
    _, cache = MODEL.run_with_cache(other)
    names = ("resid_pre", "streams_pre", "predicted", "laurel_out", "activated", "corrected", "streams_post")
    sites = [f"blocks.{layer}.hook_{name}" for layer in (0, 3) for name in names]
    cells = [[Edit(site, cache[site], (pos,))] for site in sites for pos in (2, 9)]
    seen: dict[int, Tensor] = {}
    experiment = Experiment(MODEL, tokens, [lambda logits: logits[:, -1, 3] - logits[:, -2, 5]])
    for index, scores in experiment.run(cells, progress=False):
        seen[index] = scores[0]
    assert experiment.cost.forwards == 1, "the base run"
    for index, cell in enumerate(cells):
        logits = naive(MODEL, tokens, cell)
        assert_close(seen[index], logits[:, -1, 3] - logits[:, -2, 5])


def test_a_grid_of_the_other_streams() -> None:
    clean, corrupted = prompt(EVERYTHING, batch=1), prompt(EVERYTHING, batch=2)[1:]
    grid = sweep(MODEL, corrupted, clean, sites="streams_pre", metric=lambda logits: logits[:, -1, 3])
    assert grid.mean.shape == (MODEL.cfg.n_layers, clean.shape[1])
    assert bool(grid.mean.isfinite().all())


# ---- what reads the stream -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=str)
@torch.no_grad()
def test_the_lens_merges_the_streams(case: Any) -> None:
    model, tokens = hooked(case), prompt(case)
    logits, cache = model.run_with_cache(tokens)
    found = logit_lens(model, tokens, site="streams_post", k=3)
    assert torch.equal(found.tokens[-1], logits.topk(3).indices.transpose(0, 1))
    assert_close(found.logits[-1], logits.topk(3).values.transpose(0, 1))
    assert_close(logit_lens(model, cache, site="streams_post", k=3).logits, found.logits)
    merged = model.ln_final.merged(cache["streams_post", 0])
    of_first = model.cap_logits(model.unembed.unhooked(model.ln_final.unhooked(merged)))
    assert_close(found.logits[0], of_first.topk(3).values.transpose(0, 1))


def lens_of_one(model: HookedTransformer, cache: Any) -> object:
    return logit_lens(model, cache, site="resid_post")


def tuned(model: HookedTransformer, cache: Any) -> object:
    return train_tuned_lens(model, prompt(EVERYTHING), steps=1)


REFUSED: dict[str, Callable[[HookedTransformer, Any], object]] = {
    "'blocks.0.hook_resid_post' alone has no logits": lens_of_one,
    "there is no tuned lens": tuned,
    "there is no accumulated stream": lambda model, cache: cache.accumulated_resid(),
    "there is no decomposition": lambda model, cache: cache.decompose_resid(),
    "there is no stack of components": lambda model, cache: cache.logit_attrs(cache["attn_out", 0][None], 5),
    "weights": lambda model, cache: neuron_top_tokens(model, 1, 3, k=2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_needs_one_stream_is_refused(message: str) -> None:
    with torch.no_grad():
        _, cache = MODEL.run_with_cache(prompt(EVERYTHING))
    with pytest.raises(ValueError, match=re.escape(message) + ".*this model has 4 residual streams"):
        REFUSED[message](MODEL, cache)


def test_other_decompositions_are_refused() -> None:
    with torch.no_grad():
        _, cache = MODEL.run_with_cache(prompt(EVERYTHING))
    for refused in (cache.stack_head_results, cache.stack_neuron_results, cache.get_full_resid_decomposition):
        with pytest.raises(ValueError, match="this model has 4 residual streams"):
            refused(-1)
    assert cache.stack_activation("resid_post").shape[0] == MODEL.cfg.n_layers
    with pytest.raises(ValueError, match="this model has 4 residual streams"):
        Graph.of(MODEL)
