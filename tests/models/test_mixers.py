"""Decoders in which some blocks, or all, have a state space instead of attention: what the whole package asks of them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerBlock, MixerMLPBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.components.ssm.delta_net import GatedDeltaNet
from hooked_lm.components.ssm.mamba import Mamba
from hooked_lm.components.ssm.mamba2 import Mamba2
from hooked_lm.components.ssm.rg_lru import RGLRU
from hooked_lm.models.caches.decompose import head_results
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.models.weights.fold import process_weights, refactor_factored_attn_matrices
from tests.close import GRADIENT, MODEL, assert_close
from tests.core import thinned
from tests.models.toys import padded

NORM, MLP = LayerNorm.Config(12), GatedMLP.Config(12, 10, bias=True)
MAMBA = Mamba.Config(12, d_inner=16, d_state=3, dt_rank=2)
MAMBA2 = Mamba2.Config(12, n_heads=4, d_head=4, d_state=5, n_groups=2, bias=True)
RG_LRU = RGLRU.Config(12, d_inner=8, n_channel_groups=2)
DELTA_NET = GatedDeltaNet.Config(12, n_heads=4, d_head=3, n_groups=2, d_state=5, eps=1.0)
ATTENTION = Attention.Config(12, n_heads=3, d_head=4, qkv_bias=True, rotary=Rotary(4), window=4)
BLOCKS: dict[str, tuple[Any, ...]] = {
    "pure": (
        MixerBlock.Config(mixer=MAMBA, ln1=NORM, ln1_post=LayerNorm.Config(12), wide_stream=True),
        MixerBlock.Config(mixer=MAMBA2, ln1=NORM, residual_scale=0.5, wide_stream=True),
    ),
    "hybrid": (
        MixerMLPBlock.Config(mixer=RG_LRU, ln1=NORM, mlp=MLP, ln2=NORM),
        PreNormBlock.Config(attn=ATTENTION, ln1=NORM, mlp=MLP, ln2=NORM),
        MixerMLPBlock.Config(mixer=MAMBA2, ln1=NORM, mlp=MLP, ln2=NORM, ln2_post=NORM),
        MixerBlock.Config(mixer=MAMBA, ln1=NORM),
    ),
    "delta rule": (
        MixerMLPBlock.Config(mixer=DELTA_NET, ln1=NORM, mlp=MLP, ln2=NORM),
        PreNormBlock.Config(attn=GatedAttention.Config(**vars(ATTENTION)), ln1=NORM, mlp=MLP, ln2=NORM),
        MixerBlock.Config(mixer=DELTA_NET, ln1=NORM),
    ),
}


def built(kind: str) -> HookedTransformer:
    """A model in which every weight matters; in float64, as decays near 1 leave little of `1 - decay` in float32."""
    tree = DecoderConfig(30, Embed.Config(20, 12), BLOCKS[kind], Unembed.Config(12, 20), ln_final=NORM)
    model = HookedTransformer(HookedTransformerConfig.from_tree(tree, device="cpu", seed=1, initializer_range=0.5))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".W_" not in name:
                weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return model.double().requires_grad_(False)


def assert_same(found: Tensor, expected: Tensor, depth: float = MODEL) -> None:
    """Up to the rounding of the angles of rotary positions, which are in float32 in every model."""
    assert_close(found, expected, depth, dtype=torch.float32)


@pytest.fixture(params=BLOCKS)
def model(request: pytest.FixtureRequest) -> HookedTransformer:
    return built(request.param)


@pytest.fixture
def hybrid() -> HookedTransformer:
    return built("hybrid")


def ids(batch: int = 2, n_pos: int = 12) -> torch.Tensor:
    return torch.randint(20, (batch, n_pos), generator=torch.Generator().manual_seed(2))


# ---- config and weights ----------------------------------------------------------------------------------------------


def test_flat_names() -> None:
    pure, hybrid = built("pure").cfg, built("hybrid").cfg
    assert (pure.n_heads, pure.d_head, pure.d_mlp, pure.positional_embedding_type) == (-1, -1, None, "none")
    assert (hybrid.n_heads, hybrid.d_head, hybrid.d_mlp, hybrid.window_size) == (3, 4, 10, 4)
    assert hybrid.attn_types is None
    assert hybrid.use_local_attn
    assert pure.n_params == MAMBA.n_weights + MAMBA2.n_weights
    assert hybrid.n_params == RG_LRU.n_weights + MAMBA2.n_weights + MAMBA.n_weights + 3 * 3 * 120 + 4 * 144
    assert HookedTransformerConfig.from_dict(hybrid.to_dict()).tree == hybrid.tree


@pytest.mark.parametrize("mixer", [MAMBA, MAMBA2, RG_LRU])
def test_n_weights_counts_the_matrices(mixer: Any) -> None:
    matrices = [w for name, w in mixer.build().named_parameters() if name.startswith("W_")]
    assert mixer.n_weights == sum(weight.numel() for weight in matrices)


def test_new_models_are_random_and_repeatable(model: HookedTransformer) -> None:
    again = HookedTransformer(model.cfg)
    other = HookedTransformer(model.cfg)
    assert torch.equal(again(ids()), other(ids()))
    assert again(ids()).isfinite().all()
    stds = {name: w.std() for name, w in again.named_parameters() if ".W_" in name}
    assert all(0.2 < std < 0.8 for std in stds.values()), stds


def test_weights_of_attention_cannot_be_stacked(model: HookedTransformer) -> None:
    without = {2: "[0, 1]", 3: "[0, 2]", 4: "[0, 2, 3]"}[len(model.blocks)]
    for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "QK", "OV"):
        with pytest.raises(
            ValueError, match="no attention in blocks " + without.replace("[", r"\[").replace("]", r"\]")
        ):
            getattr(model, name)
    with pytest.raises(ValueError, match="no MLPs in blocks"):
        _ = model.W_in


def test_head_labels_are_those_of_layers_with_heads(hybrid: HookedTransformer) -> None:
    assert hybrid.all_head_labels() == ["L1H0", "L1H1", "L1H2"]
    assert built("pure").all_head_labels() == []


def test_ungrouping_passes_over_mixers(model: HookedTransformer) -> None:
    before = model(ids())
    model.set_ungroup_grouped_query_attention(True)
    assert torch.equal(model(ids()), before)


def test_a_mixer_can_be_replaced(model: HookedTransformer) -> None:
    class Half(torch.nn.Module):
        def forward(self, stream: torch.Tensor, context: Any, layer: int) -> torch.Tensor:
            return stream / 2

    model.blocks[0].mixer = Half()
    model.setup()
    _, cache = model.run_with_cache(ids())
    assert not any(name.startswith("blocks.0.mixer.") for name in cache)
    halved = norm_of(model.blocks[0], "ln1_post")(model.blocks[0].ln1.unhooked(cache["resid_pre", 0]) / 2)
    assert_close(cache["mixer_out", 0], halved)
    assert model.verify(ids()).ok


def test_state_dicts_and_copies(model: HookedTransformer) -> None:
    copied = copy.deepcopy(model)
    assert torch.equal(copied(ids()), model(ids()))
    fresh = HookedTransformer(model.cfg)
    fresh.load_and_process_state_dict(
        model.state_dict(), fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    assert torch.equal(fresh(ids()), model(ids()))


# ---- identities, folding, decomposition ------------------------------------------------------------------------------


def test_identities(model: HookedTransformer) -> None:
    report = model.verify(ids())
    assert report.ok, str(report)
    recurrences = {
        "mixer: the recurrence of conv, dt, B, C == y",
        "mixer: the gated delta rule of conv_q, conv_k, conv_v, g, beta == z",
    }
    assert len(recurrences & {check.name for check in report.checks}) == 1


@pytest.mark.parametrize(
    ("kind", "name", "broken"),
    [
        ("pure", "blocks.0.mixer.hook_dt", "mixer: the recurrence of conv, dt, B, C == y"),
        ("pure", "blocks.1.mixer.norm.hook_normalized", "mixer: norm: normalized * scale == stream"),
        ("pure", "blocks.1.mixer.hook_conv", "mixer: act(conv(x)) == conv"),
        ("hybrid", "blocks.0.mixer.hook_a", "mixer: r -> a"),
        ("hybrid", "blocks.0.mixer.hook_y", "mixer(ln1(resid_pre)) == mixer_out"),
        ("delta rule", "blocks.0.mixer.hook_k", "mixer: act(conv(k)) == conv_k"),
        ("delta rule", "blocks.0.mixer.hook_g", "mixer: stream -> g"),
        ("delta rule", "blocks.0.mixer.hook_beta", "mixer: stream -> beta"),
        (
            "delta rule",
            "blocks.0.mixer.hook_conv_v",
            "mixer: the gated delta rule of conv_q, conv_k, conv_v, g, beta == z",
        ),
        ("delta rule", "blocks.2.mixer.hook_gate", "mixer(ln1(resid_pre)) == mixer_out"),
        ("delta rule", "blocks.1.attn.hook_gate", "attn: pattern @ v == z, gated"),
    ],
)
def test_a_site_that_lies_is_noticed(kind: str, name: str, broken: str) -> None:
    model = built(kind)
    with model.hooks([(name, lambda value, hook: value * 1.5)]):
        lies = model.verify(ids())
    assert not lies.ok

    class Liar(type(model.hook_dict[name])):  # shows one value and lets another pass
        def _run(self, value: torch.Tensor) -> torch.Tensor:
            super()._run(value * 1.5)
            return value

    point = model.hook_dict[name]
    point.__class__ = Liar
    assert broken in model.verify(ids()).failed


def test_folding_keeps_the_predictions(model: HookedTransformer) -> None:
    before = model(ids()).log_softmax(-1)
    process_weights(model)
    assert "fold_ln" in model.cfg.processed
    assert not hasattr(model.blocks[0].ln1, "w")
    assert "center_writing_weights" in model.cfg.processed
    assert_close(model(ids()).log_softmax(-1), before)
    assert model.verify(ids()).ok
    written = [block.mixer.W_out for block in model.blocks if hasattr(block, "mixer") and block.cfg.ln1_post is None]
    for weight in written:
        assert_close(weight.mean(-1), 0.0, scale=weight)
    assert model.cfg.tree.blocks[0].mixer == model.blocks[0].mixer.cfg


def test_refactoring_refuses_the_rotation_of_its_attention(hybrid: HookedTransformer) -> None:
    with pytest.raises(ValueError, match="rotates"):
        refactor_factored_attn_matrices(hybrid)
    refactor_factored_attn_matrices(built("pure"))  # nothing to do


@pytest.mark.parametrize("mlp_input", [False, True])
def test_the_stream_is_the_sum_of_its_parts(hybrid: HookedTransformer, mlp_input: bool) -> None:
    _, cache = hybrid.run_with_cache(ids())
    layer = 2 if mlp_input else 4
    expected = cache["resid_mid", 2] if mlp_input else cache["resid_post", 3]
    parts, labels = cache.decompose_resid(layer, mlp_input=mlp_input, return_labels=True)
    assert_close(parts.sum(0), expected)
    assert labels[1:6] == ["0_mixer_out", "0_mlp_out", "1_attn_out", "1_mlp_out", "2_mixer_out"]
    for expand in (True, False):
        full, names = cache.get_full_resid_decomposition(
            layer, mlp_input=mlp_input, expand_neurons=expand, return_labels=True
        )
        assert_close(full.sum(0), expected)
        assert len(names) == len(full)
    assert torch.equal(cache.accumulated_resid(layer, mlp_input=mlp_input)[-1], expected)


def test_heads_of_layers_that_have_some(hybrid: HookedTransformer) -> None:
    _, cache = hybrid.run_with_cache(ids())
    stack, labels = cache.stack_head_results(-1, return_labels=True, incl_remainder=True)
    assert labels == ["L1H0", "L1H1", "L1H2", "remainder"]
    assert_close(stack.sum(0), cache["resid_post", -1])
    cache.compute_head_results()
    assert "blocks.0.attn.hook_result" not in cache
    with pytest.raises(ValueError, match="no attention at layer 0"):
        head_results(hybrid, cache, 0)


def test_accumulated_bias() -> None:
    model = built("hybrid")
    expected = model.blocks[0].mixer.b_out + model.blocks[0].mlp.b_out + model.blocks[1].mlp.b_out
    assert_close(model.accumulated_bias(2), expected)
    assert_close(model.accumulated_bias(1, include_mlp_biases=False), model.blocks[0].mixer.b_out)


def test_short_names(hybrid: HookedTransformer) -> None:
    _, cache = hybrid.run_with_cache(ids(), names_filter=None)
    assert cache["dt", 3] is cache["blocks.3.mixer.hook_dt"]
    assert cache["gate", 0].shape == (2, 12, 8)
    assert cache["mixer_out", -1].shape == (2, 12, 12)
    assert "blocks.3.mixer.hook_state" not in cache
    _, states = hybrid.run_with_cache(ids(), names_filter=["blocks.*.mixer.hook_state"])
    assert states["state", 3].shape == (2, 12, 16, 3)


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_a_wide_stream_is_kept_in_fp32() -> None:
    model = built("pure").to(torch.bfloat16)
    logits, cache = model.run_with_cache(ids())
    assert logits.dtype == torch.bfloat16
    assert cache["resid_post", -1].dtype == torch.float32
    assert cache["mixer_out", 0].dtype == torch.bfloat16
    assert model.verify(ids()).ok
    resid = cache["resid_post", 0]
    assert_close(model(resid, start_at_layer=1), logits)


def test_a_run_can_begin_and_end_anywhere(hybrid: HookedTransformer) -> None:
    logits = hybrid(ids())
    for layer in range(5):
        resid = hybrid(ids(), stop_at_layer=layer)
        assert_same(hybrid(resid, start_at_layer=layer), logits)


# ---- caches and generation -------------------------------------------------------------------------------------------


def test_cached_pieces_are_the_whole(model: HookedTransformer) -> None:
    tokens, cache = ids(2, 20), KeyValueCache.init_cache(model.cfg)
    pieces = [model(piece, past_kv_cache=cache) for piece in tokens.split([7, 1, 1, 11], 1)]
    assert_same(torch.cat(pieces, 1), model(tokens))
    assert cache.length == 20


def test_a_frozen_cache_stays_as_it_is(model: HookedTransformer) -> None:
    tokens, cache = ids(2, 12), KeyValueCache(model.cfg.n_layers)
    model(tokens[:, :5], past_kv_cache=cache)
    cache.freeze()
    for _ in range(2):
        found = model(tokens[:, 5:], past_kv_cache=cache)
        assert_same(found, model(tokens)[:, 5:])
        assert cache.length == 5
    resid = model(tokens[:, 5:], past_kv_cache=cache, stop_at_layer=1)
    assert_same(resid, model(tokens, stop_at_layer=1)[:, 5:])


@pytest.mark.parametrize("filled", [False, True])
def test_a_run_that_fails_leaves_the_cache_as_it_was(model: HookedTransformer, filled: bool) -> None:
    tokens, cache = ids(2, 12), KeyValueCache(model.cfg.n_layers)
    if filled:
        model(tokens[:, :5], past_kv_cache=cache)
    start = cache.length

    def fail(value: torch.Tensor, hook: Any) -> None:
        raise RuntimeError("stop here")

    last = f"blocks.{len(model.blocks) - 1}.hook_resid_post"
    with pytest.raises(RuntimeError, match="stop here"):
        model.run_with_hooks(tokens[:, start:9], past_kv_cache=cache, fwd_hooks=[(last, fail)])
    assert cache.length == start
    rest = model(tokens[:, start:], past_kv_cache=cache)
    assert_same(rest, model(tokens)[:, start:])


def test_rows_must_agree(model: HookedTransformer) -> None:
    cache = KeyValueCache(model.cfg.n_layers)
    model(ids(2), past_kv_cache=cache)
    with pytest.raises(ValueError, match=r"2 rows.*3"):
        model(ids(3), past_kv_cache=cache)
    assert cache.length == 12


def test_entries_are_of_the_kind_that_a_layer_needs(hybrid: HookedTransformer) -> None:
    cache = KeyValueCache(4)
    hybrid(ids(), past_kv_cache=cache)
    assert cache[1].past_keys.shape == (2, 12, 3, 4)
    assert cache.state(0).state.shape == (2, 8)
    assert cache[0].length == 0
    assert set(cache.states) == {0, 2, 3}
    del cache.states[0]
    with pytest.raises(ValueError, match="state of layer 0 after 0 tokens, not 12"):
        hybrid(ids(), past_kv_cache=cache)


@pytest.mark.parametrize("side", thinned(["left", "right"], keep=["left"]))
def test_generation_of_padded_prompts(model: HookedTransformer, side: str) -> None:
    rows = [ids(1, n)[0] for n in (9, 3, 6)]
    tokens, mask = padded(rows, side)
    options = {"max_new_tokens": 6, "do_sample": False, "stop_at_eos": False, "verbose": False}
    found = model.generate(tokens, attention_mask=mask, **options)
    afresh = model.generate(tokens, attention_mask=mask, use_past_kv_cache=False, **options)
    assert torch.equal(found, afresh)
    for row, alone in zip(found, rows, strict=True):
        expected = model.generate(alone[None], **options)[0]
        assert torch.equal(row[-len(expected) :], expected)


def test_what_is_seen_while_generating(model: HookedTransformer) -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "stop_at_eos": False, "verbose": False}
    tokens, cache = model.generate(ids(), return_cache=True, names_filter="*.mixer.hook_*", **options)
    _, expected = model.run_with_cache(tokens, names_filter="*.mixer.hook_*")
    assert set(cache) == set(expected)
    for name in expected:
        assert_same(cache[name], expected[name])


def test_padding_that_comes_later(model: HookedTransformer) -> None:
    """Right-padded prompts, and more tokens after the padding."""
    rows, more = [ids(1, n)[0] for n in (7, 4)], ids(2, 3)
    tokens, mask = padded(rows, "right")
    cache = KeyValueCache(model.cfg.n_layers)
    model(tokens, attention_mask=mask, past_kv_cache=cache)
    found = model(more, past_kv_cache=cache)
    for i, row in enumerate(rows):
        alone = model(torch.cat([row, more[i]])[None])[0, -3:]
        assert_same(found[i], alone)


def test_gradients_flow_through_a_cache(model: HookedTransformer) -> None:
    model.requires_grad_(True)
    tokens = ids(1, 10)
    model(tokens)[:, -1].square().sum().backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    cache = KeyValueCache(model.cfg.n_layers)
    model(tokens[:, :6], past_kv_cache=cache)
    model(tokens[:, 6:], past_kv_cache=cache)[:, -1].square().sum().backward()
    for name, weight in model.named_parameters():
        assert_same(weight.grad, expected[name], GRADIENT)
