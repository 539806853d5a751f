"""The cache of a run: what its names mean, and how the residual stream comes apart."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.components.blocks.block import MLPPart, PreNormBlock
from hooked_lm.components.blocks.parallel import ParallelBlock
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of
from hooked_lm.hooks import Slice
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.config.flat import HookedTransformerConfig
from tests.close import assert_close
from tests.models import toys
from tests.models.structures import D_MODEL, D_VOCAB, NORMS, SEEDS, random_model, random_tokens, random_tree

SOME = settings(max_examples=30)  # models are slow to build with every annotation checked


def flat_model(**changes: object) -> HookedTransformer:
    sizes = {"n_layers": 3, "d_model": D_MODEL, "n_ctx": 8, "n_heads": 3, "d_vocab": D_VOCAB, "d_mlp": 5}
    cfg = HookedTransformerConfig(**{**sizes, "act_fn": "gelu", "device": "cpu", **changes})
    return random_model(cfg.tree)


def post_norm_model() -> HookedTransformer:
    """Norms of both kinds after the sublayers, a residual multiplier, no output bias of attention."""
    tree = flat_model().cfg.tree
    blocks = tuple(
        replace(
            block,
            ln1_post=NORMS["LN"],
            ln2_post=NORMS["RMS, offset 1"],
            residual_scale=0.5,
            attn=replace(block.attn, out_bias=False),
        )
        for block in tree.blocks
    )
    return random_model(replace(tree, blocks=blocks))


def cached(model: HookedTransformer, **kwargs: object) -> tuple[Tensor, ActivationCache]:
    with torch.no_grad():
        return model.run_with_cache(random_tokens(), **kwargs)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return flat_model()


@pytest.fixture
def cache(model: HookedTransformer) -> ActivationCache:
    return cached(model)[1]


# ---- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (("z", 1), "blocks.1.attn.hook_z"),
        (("resid_post", -1), "blocks.2.hook_resid_post"),
        (("k", 2, "attn"), "blocks.2.attn.hook_k"),
        (("k", 2, "a"), "blocks.2.attn.hook_k"),
        (("scale", 0, "ln2"), "blocks.0.ln2.hook_scale"),
        (("scale", None), "ln_final.hook_scale"),
        (("pattern", np.int64(-1)), "blocks.2.attn.hook_pattern"),
        (("attn", 0), "blocks.0.attn.hook_pattern"),
        ("k2", "blocks.2.attn.hook_k"),
        ("scale1ln1", "blocks.1.ln1.hook_scale"),
        ("embed", "hook_embed"),
        ("blocks.1.hook_out", "blocks.1.hook_resid_post"),
        ("blocks.1.mlp.hook_post", "blocks.1.mlp.hook_post"),
    ],
)
def test_names(cache: ActivationCache, key: object, name: str) -> None:
    assert cache[key] is cache.cache_dict[name]
    assert key in cache


def test_gradients_have_names_too(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(random_tokens(), return_type="loss", incl_bwd=True)
    expected = cache.cache_dict["blocks.2.hook_resid_post_grad"]
    for key in ("blocks.2.hook_resid_post_grad", ("resid_post_grad", -1), "blocks.2.hook_out_grad"):
        assert cache[key] is expected
    assert cache["k1_grad"] is cache.cache_dict["blocks.1.attn.hook_k_grad"]


def test_a_cache_is_a_mapping(cache: ActivationCache) -> None:
    assert isinstance(cache, Mapping)
    assert list(cache) == list(cache.keys()) == list(cache.cache_dict)
    assert len(cache) == len(cache.values()) == len(list(cache.items()))
    assert cache.get("nothing of the kind") is None


def test_layers_out_of_range(cache: ActivationCache) -> None:
    with pytest.raises(IndexError, match="-3 to 2"):
        cache["z", 3]
    for read in (cache.accumulated_resid, cache.decompose_resid, cache.stack_head_results):
        with pytest.raises(IndexError, match="0 to 3"):
            read(4)
    with pytest.raises(IndexError):
        cache.get_neuron_results(3)


def test_components_and_the_scale_of_the_norm_are_of_the_same_positions(cache: ActivationCache) -> None:
    for stack, part in ((cache.decompose_resid(), -1), (cache.decompose_resid(pos_slice=-1), None)):
        with pytest.raises(ValueError, match="give the same pos_slice and batch_slice"):
            cache.logit_attrs(stack, 3, pos_slice=part)
    last = cache["resid_post", -1][:, -1]  # one component, without an axis for components
    assert cache.apply_ln_to_stack(last, pos_slice=-1).shape == last.shape


def test_parts_that_do_not_exist(model: HookedTransformer, cache: ActivationCache) -> None:
    with pytest.raises(IndexError, match=r"index 999 .* -6 to 5"):
        cached(model, pos_slice=999)
    with pytest.raises(IndexError, match=r"index 600 .* -5 to 4"):
        cache.stack_neuron_results(2, neuron_slice=600)
    stack, row = cache.decompose_resid(), cache.apply_slice_to_batch_dim(0)
    with pytest.raises(ValueError, match="no batch dimension to slice"):
        row.apply_ln_to_stack(stack[:, 0], batch_slice=1, has_batch_dim=False)
    with pytest.raises(ValueError, match="no batch dimension to slice"):
        row.logit_attrs(stack, 3, batch_slice=1)
    for read in (cache.stack_neuron_results, cache.get_full_resid_decomposition):
        with pytest.raises(ValueError, match=rf"d_model {D_MODEL}, got shape \({D_MODEL + 1},"):
            read(2, project_output_onto=torch.zeros(D_MODEL + 1))
    with pytest.raises(ValueError, match=rf"got shape \({D_MODEL + 2}, 3\)"):
        cache.get_neuron_results(1, project_output_onto=torch.zeros(D_MODEL + 2, 3))


def test_what_was_filtered_away_is_named(model: HookedTransformer) -> None:
    _, cache = cached(model, names_filter="blocks.*.attn.hook_z")
    for read, glob in [
        (lambda: cache["resid_pre", 1], "blocks.*.hook_resid_pre"),
        (lambda: cache["z_grad", 1], "blocks.*.attn.hook_z"),
        (cache.decompose_resid, "hook_embed"),
        (cache.accumulated_resid, "blocks.*.hook_resid_pre"),
        (lambda: cache.stack_neuron_results(1), "blocks.*.mlp.hook_post"),
        (lambda: cache.stack_head_results(apply_ln=True), "ln_final.hook_scale"),
        (lambda: cache["attn_in", 0], "blocks.*.hook_attn_in"),
    ]:
        with pytest.raises(KeyError) as error:
            read()
        assert f"names_filter='{glob}'" in str(error.value)
        cached(model, names_filter=glob)  # the advice can be followed
    with pytest.raises(KeyError, match="incl_bwd"):
        cache["z_grad", 1]
    with pytest.raises(KeyError, match=r"did you mean 'blocks\.0\.attn\.hook_z'"):
        cache["blocks.0.atn.hook_z"]
    with pytest.raises(KeyError, match=r"name its layer, as in 'blocks\.0\.hook_resid_post'"):
        cache["resid_post"]


def test_heads_need_nothing_but_z(model: HookedTransformer) -> None:
    _, full = cached(model)
    _, cache = cached(model, names_filter="blocks.*.attn.hook_z")
    assert_close(cache.stack_head_results(), full.stack_head_results())  # the fused kernel, and the steps


# ---- the stream is the sum of its parts ----------------------------------------------------------------


@SOME
@given(SEEDS)
def test_parts_sum_to_the_stream(structure: int) -> None:
    model = random_model(random_tree(structure))
    _, cache = cached(model)
    n_layers = model.cfg.n_layers
    for layer in range(n_layers + 1):
        stream = cache["resid_post", layer - 1] if layer else cache["resid_pre", 0]
        assert_close(cache.decompose_resid(layer).sum(0), stream)
        assert_close(cache.accumulated_resid(layer)[-1], stream)
        assert_close(cache.get_full_resid_decomposition(layer).sum(0), stream)
        assert_close(cache.get_full_resid_decomposition(layer, expand_neurons=False).sum(0), stream)
        assert_close(cache.stack_head_results(layer, incl_remainder=True).sum(0), stream)
        assert_close(cache.stack_neuron_results(layer, incl_remainder=True).sum(0), stream)


@SOME
@given(SEEDS)
def test_parts_sum_to_what_mlps_read(structure: int) -> None:
    model = random_model(random_tree(structure))
    _, cache = cached(model)
    for layer, block in enumerate(model.blocks):
        if isinstance(block, MLPPart):
            stream = cache["resid_mid" if isinstance(block, PreNormBlock) else "resid_pre", layer]
            assert_close(cache.decompose_resid(layer, mlp_input=True).sum(0), stream)
            assert_close(cache.accumulated_resid(layer, mlp_input=True)[-1], stream)
            assert_close(cache.get_full_resid_decomposition(layer, mlp_input=True).sum(0), stream)
            stack = cache.decompose_resid(layer, mlp_input=True, apply_ln=True)
            has_norm = getattr(block.cfg, block.mlp_norm) is not None
            seen = cache["normalized", layer, block.mlp_norm] if has_norm else stream
            assert_close(stack.sum(0), seen)


@pytest.mark.slow
@SOME
@given(SEEDS)
def test_each_sublayer_is_the_sum_of_its_parts(structure: int) -> None:
    model = random_model(random_tree(structure))
    _, cache = cached(model)
    for layer, block in enumerate(model.blocks):
        before = cache.get_full_resid_decomposition(layer, return_labels=True)
        after = cache.get_full_resid_decomposition(layer + 1, return_labels=True)
        parts = [dict(zip(labels, stack, strict=True)) for stack, labels in (before, after)]
        bias = parts[1]["bias"] - parts[0]["bias"]
        new = torch.stack([part for label, part in parts[1].items() if label not in parts[0]]).sum(0)
        written = cache["attn_out", layer]
        written = written + cache["mlp_out", layer] if isinstance(block, MLPPart) else written
        assert_close(new + bias, written)


@pytest.mark.slow
@SOME
@given(SEEDS)
def test_normalised_parts_sum_to_the_normalised_stream(structure: int) -> None:
    model = random_model(random_tree(structure))
    _, cache = cached(model)
    final = isinstance(norm_of(model, "ln_final"), (LayerNorm, RMSNorm))
    seen = cache["normalized"] if final else cache["resid_post", -1]
    directions = torch.randn(D_MODEL, 2)
    assert_close(cache.decompose_resid(apply_ln=True).sum(0), seen)
    assert_close(cache.stack_head_results(incl_remainder=True, apply_ln=True).sum(0), seen)
    assert_close(cache.stack_neuron_results(-1, incl_remainder=True, apply_ln=True).sum(0), seen)
    assert_close(cache.get_full_resid_decomposition(apply_ln=True).sum(0), seen)
    for onto in (directions, directions[:, 0]):
        for expand in (True, False):
            stack = cache.get_full_resid_decomposition(apply_ln=True, expand_neurons=expand, project_output_onto=onto)
            assert_close(stack.sum(0), seen @ onto)
            unprojected = cache.get_full_resid_decomposition(apply_ln=True, expand_neurons=expand)
            assert_close(stack, unprojected @ onto)
        stack = cache.stack_neuron_results(-1, incl_remainder=True, project_output_onto=onto)
        assert_close(stack.sum(0), cache["resid_post", -1] @ onto)


@pytest.mark.every_parameter
@SOME
@given(SEEDS)
def test_logit_attributions_sum_to_the_logits(structure: int) -> None:
    tree = random_tree(structure)
    model = random_model(replace(tree, unembed=replace(tree.unembed, soft_cap=None)))
    logits, cache = cached(model)
    tokens, others = random_tokens(), (random_tokens() + 1) % D_VOCAB
    shift = norm.shift() if isinstance(norm := norm_of(model, "ln_final"), LayerNorm) else None
    constant = model.b_U if shift is None else model.b_U + shift @ model.W_U  # what no component carries
    expected = logits - model.unembed.cfg.scale * constant
    expected, other = (expected.gather(-1, ids[..., None])[..., 0] for ids in (tokens, others))
    for stack in (cache.decompose_resid(), cache.get_full_resid_decomposition()):
        assert_close(cache.logit_attrs(stack, tokens).sum(0), expected)
        assert_close(cache.logit_attrs(stack, tokens, others).sum(0), expected - other)


def test_the_logits_of_a_folded_model(model: HookedTransformer) -> None:
    model = flat_model()
    model.process_weights_()
    logits, cache = cached(model)
    attributed = cache.logit_attrs(cache.decompose_resid(), 4, incorrect_tokens=9)
    assert_close(attributed.sum(0) + model.b_U[4] - model.b_U[9], logits[..., 4] - logits[..., 9])


# ---- shapes, slices, labels ----------------------------------------------------------------------------


def test_labels(cache: ActivationCache) -> None:
    accumulated = cache.accumulated_resid(2, incl_mid=True, mlp_input=True, return_labels=True)[1]
    assert accumulated == ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid"]
    assert cache.accumulated_resid(return_labels=True)[1] == ["0_pre", "1_pre", "2_pre", "final_post"]
    sublayers = cache.decompose_resid(1, mlp_input=True, return_labels=True)[1]
    assert sublayers == ["embed", "pos_embed", "0_attn_out", "0_mlp_out", "1_attn_out"]
    assert cache.decompose_resid(1, mode="mlp", incl_embeds=False, return_labels=True)[1] == ["0_mlp_out"]
    assert cache.decompose_resid(1, mode="attn", return_labels=True)[1][2:] == ["0_attn_out"]
    heads = cache.stack_head_results(1, return_labels=True, incl_remainder=True)[1]
    assert heads == ["L0H0", "L0H1", "L0H2", "remainder"]
    neurons = cache.stack_neuron_results(2, neuron_slice=[4, 1], return_labels=True)[1]
    assert neurons == ["L0N4", "L0N1", "L1N4", "L1N1"]
    everything = cache.get_full_resid_decomposition(1, return_labels=True)[1]
    neurons = [f"L0N{n}" for n in range(5)]
    assert everything == ["L0H0", "L0H1", "L0H2", *neurons, "embed", "pos_embed", "bias"]
    sublayers = cache.get_full_resid_decomposition(1, expand_neurons=False, return_labels=True)[1]
    assert sublayers == ["L0H0", "L0H1", "L0H2", "0_mlp_out", "embed", "pos_embed", "bias"]


@pytest.mark.parametrize("part", [None, -1, 2, (1, 4), [0, 5], Slice((0, 2))])
def test_positions(cache: ActivationCache, part: object) -> None:
    chosen = part if isinstance(part, Slice) else Slice(part)
    for read in (
        cache.accumulated_resid,
        cache.decompose_resid,
        cache.stack_head_results,
        lambda **kw: cache.stack_neuron_results(-1, **kw),
        cache.get_full_resid_decomposition,
    ):
        for apply_ln in (False, True):
            whole = read(apply_ln=apply_ln)
            assert_close(read(pos_slice=part, apply_ln=apply_ln), chosen.apply(whole, 2))
    assert_close(cache.get_neuron_results(-1, (1, 3), part), chosen.apply(cache.get_neuron_results(2)[..., 1:3, :], 1))
    attributed = cache.logit_attrs(cache.decompose_resid(pos_slice=part), 3, pos_slice=part)
    assert_close(attributed, chosen.apply(cache.logit_attrs(cache.decompose_resid(), 3), 2))


def test_without_a_batch(model: HookedTransformer) -> None:
    with torch.no_grad():
        _, batched = model.run_with_cache(random_tokens(1))
        _, cache = model.run_with_cache(random_tokens(1), remove_batch_dim=True)
    for read in ("accumulated_resid", "decompose_resid", "stack_head_results", "get_full_resid_decomposition"):
        for kwargs in ({}, {"apply_ln": True}, {"pos_slice": -1, "apply_ln": True}):
            assert_close(getattr(cache, read)(**kwargs), getattr(batched, read)(**kwargs)[:, 0])
    stack = cache.decompose_resid()
    assert_close(
        cache.logit_attrs(stack, random_tokens(1)[0], has_batch_dim=False).sum(0),
        batched.logit_attrs(batched.decompose_resid(), random_tokens(1)).sum(0)[0],
    )
    assert_close(batched.remove_batch_dim()["z", 0], cache["z", 0])


def test_batches(cache: ActivationCache) -> None:
    stack = cache.decompose_resid()
    whole = cache.logit_attrs(stack, 3)
    assert_close(cache.logit_attrs(stack, 3, batch_slice=1), whole[:, 1])
    assert_close(cache.logit_attrs(stack, 3, batch_slice=(0, 1)), whole[:, :1])
    assert_close(cache.logit_attrs(stack[:, 1], 3, batch_slice=1, has_batch_dim=False), whole[:, 1])
    one = cache.apply_slice_to_batch_dim(1)
    assert not one.has_batch_dim
    assert_close(one.apply_ln_to_stack(one.decompose_resid()), cache.apply_ln_to_stack(stack)[:, 1])
    two = cache.apply_slice_to_batch_dim([1, 0])
    assert_close(two.stack_head_results(), cache.stack_head_results()[:, [1, 0]])


def test_tokens_of_a_batch(cache: ActivationCache) -> None:
    stack = cache.decompose_resid()
    tokens = torch.tensor([3, 8])
    expected = torch.stack([cache.logit_attrs(stack, t)[:, i] for i, t in enumerate((3, 8))], 1)
    assert_close(cache.logit_attrs(stack, tokens), expected)
    assert_close(cache.logit_attrs(stack[:, :, -1], tokens, pos_slice=-1), expected[:, :, -1])
    with pytest.raises(ValueError, match="same shape"):
        cache.logit_attrs(stack, tokens, incorrect_tokens=3)
    with pytest.raises(ValueError, match="do not fit"):
        cache.logit_attrs(stack, torch.tensor([3, 8, 9]))


def test_a_logit_lens(model: HookedTransformer) -> None:
    logits, cache = cached(model)
    lens = model.unembed(cache.accumulated_resid(apply_ln=True)[-1])
    assert_close(lens, logits)
    fresh = cache.apply_ln_to_stack(cache["resid_pre", 1][None], recompute_ln=True)[0]
    assert_close(fresh, model.ln_final(cache["resid_pre", 1]))
    assert_close(cache.accumulated_resid(1, apply_ln=True)[-1], cache["normalized", 1, "ln1"])


def test_stacked_activations(cache: ActivationCache) -> None:
    assert torch.equal(cache.stack_activation("z")[2], cache["z", 2])
    assert cache.stack_activation("scale", 2, "ln1").shape[0] == 2
    assert cache.stack_activation("pattern").shape == (3, 2, 3, 6, 6)


def test_neurons_one_and_many(cache: ActivationCache) -> None:
    one, all_of_them = cache.get_neuron_results(1, neuron_slice=2), cache.get_neuron_results(1)
    assert all_of_them.shape == (2, 6, 5, D_MODEL)
    assert_close(one, all_of_them[:, :, 2])
    assert_close(cache.stack_neuron_results(2, neuron_slice=2)[1], one)
    direction = torch.randn(D_MODEL)
    assert_close(cache.get_neuron_results(1, project_output_onto=direction), all_of_them @ direction)


# ---- structures ----------------------------------------------------------------------------------------


def test_results_are_what_the_model_computes() -> None:
    model = post_norm_model()
    _, live = cached(model, names_filter=["blocks.*.attn.hook_result", "blocks.*.hook_attn_out"])
    _, cache = cached(model)
    assert "blocks.0.attn.hook_result" not in cache
    cache.compute_head_results()
    for layer in range(3):
        assert_close(cache["result", layer], live["result", layer])
    cache.compute_head_results()
    assert_close(cache["result", 2], live["result", 2])


def test_heads_behind_a_norm() -> None:
    """By hand: a LayerNorm with the divisor of the run, and the residual multiplier."""
    model = post_norm_model()
    _, cache = cached(model)
    cache.compute_head_results()
    result, norm = cache["result", 0][:, :, 1], model.blocks[0].ln1_post
    centred = result - result.mean(-1, keepdim=True)
    expected = 0.5 * centred / cache["scale", 0, "ln1_post"] * norm.w
    assert_close(cache.stack_head_results(1)[1], expected.detach())


def test_neurons_behind_a_norm() -> None:
    model = post_norm_model()
    _, cache = cached(model)
    post, norm = cache["post", 1][:, :, 3, None], model.blocks[1].ln2_post
    expected = 0.5 * post * model.blocks[1].mlp.W_out[3] / cache["scale", 1, "ln2_post"] * (1 + norm.w)
    assert_close(cache.get_neuron_results(1)[:, :, 3], expected.detach())


def test_attention_only() -> None:
    model = flat_model(attn_only=True, act_fn=None)
    _, cache = cached(model)
    assert cache.decompose_resid(mode="mlp", incl_embeds=False).shape == (0, 2, 6, D_MODEL)
    assert cache.stack_neuron_results(-1).shape == (0, 2, 6, D_MODEL)
    assert cache.get_full_resid_decomposition().shape[0] == 3 * 3 + 3
    with pytest.raises(ValueError, match="no MLP at layer 1"):
        cache.decompose_resid(1, mlp_input=True)
    with pytest.raises(ValueError, match="no MLP at layer 1"):
        cache.get_neuron_results(1)
    with pytest.raises(KeyError, match="no such site"):
        cache.accumulated_resid(incl_mid=True)


def test_the_embeddings_alone(cache: ActivationCache) -> None:
    assert cache.stack_head_results(0).shape == (0, 2, 6, D_MODEL)
    assert_close(cache.stack_head_results(0, incl_remainder=True)[0], cache["resid_pre", 0])
    assert cache.get_full_resid_decomposition(0, return_labels=True)[1] == ["embed", "pos_embed", "bias"]


def test_no_mlp_after_the_last_layer(cache: ActivationCache) -> None:
    for read in (cache.accumulated_resid, cache.decompose_resid, cache.get_full_resid_decomposition):
        with pytest.raises(ValueError, match="no MLP"):
            read(mlp_input=True)
    with pytest.raises(ValueError, match="'all', 'mlp' or 'attn'"):
        cache.decompose_resid(mode="heads")


def test_foreign_norms_are_refused() -> None:
    model = flat_model()
    model.blocks[0].ln1_post = torch.nn.Tanh()
    _, cache = cached(model)
    with pytest.raises(TypeError, match=r"'blocks\.0\.ln1_post' is a Tanh"):
        cache.stack_head_results()


def test_a_shortformers_positions_are_not_in_the_stream() -> None:
    _, cache = cached(flat_model(positional_embedding_type="shortformer"))
    assert cache.decompose_resid(0, return_labels=True)[1] == ["embed"]


def test_parallel_blocks_read_the_same_stream() -> None:
    model = flat_model(parallel_attn_mlp=True)
    _, cache = cached(model)
    assert isinstance(model.blocks[0], ParallelBlock)
    assert cache.decompose_resid(1, mlp_input=True, return_labels=True)[1][-1] == "0_mlp_out"
    assert cache.accumulated_resid(1, mlp_input=True, return_labels=True)[1] == ["0_pre", "1_pre"]


# ---- other caches --------------------------------------------------------------------------------------


def test_moving_selecting_saving(cache: ActivationCache, model: HookedTransformer, tmp_path: object) -> None:
    part = cache.select("blocks.*.attn.hook_z")
    assert isinstance(part, ActivationCache)
    assert len(part) == 3
    part.save(tmp_path / "z.safetensors")
    loaded = ActivationCache.load(tmp_path / "z.safetensors", model)
    assert_close(loaded.stack_head_results(), cache.stack_head_results())
    half = ActivationCache(dict(cache.cache_dict), model).to("cpu", torch.float16)
    assert half.stack_head_results().dtype == torch.float16


def test_nothing_asks_for_gradients(cache: ActivationCache) -> None:
    assert torch.is_grad_enabled()
    for stack in (
        cache.accumulated_resid(apply_ln=True),
        cache.stack_head_results(),
        cache.stack_neuron_results(1),
        cache.get_full_resid_decomposition(apply_ln=True),
        cache.logit_attrs(cache.decompose_resid(), 3),
    ):
        assert not stack.requires_grad


def test_toggling_gradients(cache: ActivationCache) -> None:
    try:
        cache.toggle_autodiff()
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_tokens_may_be_strings() -> None:
    model = toys.toy("standard", toys.words())
    _, cache = model.run_with_cache(toys.ids(2, 5))
    stack = cache.decompose_resid(pos_slice=-1)
    for strings, tokens in ((["w3", "w7"], torch.tensor([3, 7])), (["w3"], 3), ("w3", 3)):
        assert_close(model.tokens_to_residual_directions(strings), model.W_U.T[tokens])
        assert_close(cache.logit_attrs(stack, strings, pos_slice=-1), cache.logit_attrs(stack, tokens, pos_slice=-1))
    with pytest.raises(ValueError, match="'w3 w4' is not a single token"):
        model.tokens_to_residual_directions(["w3", "w3 w4"])


# ---- chosen heads ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_values_of_chosen_heads() -> None:
    model = flat_model(n_heads=4, n_key_value_heads=2, d_head=3)
    _, cache = model.run_with_cache(random_tokens(2, 5))
    found = cache.stack_heads("pattern", ["L2H1", "L0H3"])
    assert torch.equal(found, torch.stack([cache["pattern", 2][:, 1], cache["pattern", 0][:, 3]]))
    assert torch.equal(cache.stack_heads("z", "L1H2"), cache["z", 1][None, :, :, 2])
    assert torch.equal(cache.stack_heads("k", ["L1H1"])[0], cache["k", 1][:, :, 1])
    with pytest.raises(IndexError, match="'L1H2' does not exist: 'k' of layer 1 has 2 heads"):
        cache.stack_heads("k", ["L1H2"])
    with pytest.raises(ValueError, match=r"'resid_pre' \[batch, pos, d_model\] has no axis of heads"):
        cache.stack_heads("resid_pre", ["L1H0"])
    with pytest.raises(ValueError, match=r"'1\.2' is not the label of a head"):
        cache.stack_heads("z", ["1.2"])
    with pytest.raises(ValueError, match="heads is empty"):
        cache.stack_heads("z", [])


@torch.no_grad()
def test_values_of_chosen_heads_of_a_single_prompt() -> None:
    model = flat_model()
    _, cache = model.run_with_cache(random_tokens(1, 5), remove_batch_dim=True)
    assert torch.equal(cache.stack_heads("pattern", "L1H2")[0], cache["pattern", 1][2])


def test_a_cache_of_another_model_warns(tmp_path: Path) -> None:
    demo, raw = HookedTransformer.from_pretrained("demo"), HookedTransformer.from_pretrained_no_processing("demo")
    _, cache = demo.run_with_cache("Mary and John", names_filter="*.hook_resid_post")
    cache.save(tmp_path / "cache.safetensors")
    assert list(ActivationCache.load(tmp_path / "cache.safetensors", demo)) == list(cache)
    with pytest.warns(UserWarning, match=r"saved from another model: processed \['fold_ln.*not \[\]"):
        ActivationCache.load(tmp_path / "cache.safetensors", raw)
