"""Gemma 4 (Google DeepMind 2026, ai.google.dev/gemma/docs/core): full-attention layers have wider heads, few of whose
pairs are rotated, and may compute values with the key weights; values are normalised; the last layers may share the keys
and values of earlier ones; each layer may have a separate token embedding."""

from dataclasses import replace
from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.per_layer import PerLayerBlock, PerLayerEmbed, PerLayerGate
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.families.decoders.gemma4_text import identities as identities
from hooked_lm.families.decoders.gemma4_text.normed_moe import NormedMoE
from hooked_lm.families.decoders.gemma4_text.shared_kv import SharedKVAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# Layers that share keys and values of another layer may have unused weights for them in a checkpoint.
IGNORED = (*llama_like.IGNORED, *(f"*.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm")))
NO_EFFECT = ("hidden_act",)  # `hidden_activation` is used instead


def config(hf: HFConfig) -> DecoderConfig:
    if hf.use_bidirectional_attention == "all":
        raise ValueError("use_bidirectional_attention='all' is not supported for gemma4_text; None and 'vision' are")
    norm, d_layer = llama_like.rms_norm(hf), hf.hidden_size_per_layer_input
    hf.get("vocab_size_per_layer_input")  # no effect without an embedding for each layer
    kinds, n_unshared = hf.layer_types[: hf.num_hidden_layers], hf.num_hidden_layers - hf.num_kv_shared_layers
    kv_source_layers = {kind: layer for layer, kind in enumerate(kinds[:n_unshared])}  # the last layer of each kind
    if missing := sorted(set(kinds) - set(kv_source_layers)):
        raise ValueError(
            f"num_kv_shared_layers={hf.num_kv_shared_layers}: layers of type {', '.join(missing)} share the keys and values of "
            f"an earlier layer of that type, and there is none among the first {n_unshared}"
        )
    block = PerLayerBlock.Config(
        attn=_attention(hf, 0, is_kv_source=False),
        mlp=_mlp(hf, shares_kv=False),
        ln1=norm,
        ln1_post=norm,
        ln2=None if hf.enable_moe_block else norm,  # `NormedMoE` has separate norms for experts and MLP
        ln2_post=norm,
        per_layer=PerLayerGate.Config(hf.hidden_size, d_layer, hf.hidden_activation) if d_layer else None,
        per_layer_post=norm if d_layer else None,
    )
    sources = kv_source_layers.values() if n_unshared < len(kinds) else ()
    unshared = [replace(block, attn=_attention(hf, layer, layer in sources)) for layer in range(n_unshared)]
    shared = [
        replace(block, attn=_shared_kv(hf, layer, kv_source_layers[kinds[layer]]), mlp=_mlp(hf, shares_kv=True))
        for layer in range(n_unshared, len(kinds))
    ]
    cap = hf.final_logit_softcapping
    tree = llama_like.around(hf, [*unshared, *shared], norm, scale=hf.hidden_size**0.5, soft_cap=cap)
    return replace(tree, n_ctx=n_ctx(hf, "full_attention"), per_layer=_per_layer(hf) if d_layer else None)


def _options(hf: HFConfig, layer: int) -> dict[str, Any]:
    """Arguments of a layer's attention config, for both kinds of attention."""
    of_layer = {int(index): fields for index, fields in (hf.get("per_layer_config") or {}).items()}.get(layer, {})
    if unknown := set(of_layer) - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"per_layer_config of layer {layer} has unknown fields: {', '.join(sorted(unknown))}")
    fields = {"head_dim": hf.get("head_dim"), "num_key_value_heads": hf.get("num_key_value_heads")} | of_layer
    d_head = fields["head_dim"] or hf.hidden_size // hf.num_attention_heads
    return {
        "d_model": hf.hidden_size,
        "n_heads": hf.num_attention_heads,
        "d_head": d_head,
        "n_key_value_heads": fields["num_key_value_heads"],
        "scale": 1.0,
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "rotary": rotary(hf, d_head, hf.layer_types[layer]),
        "qk_norm": RMSNorm.Config(d_head, hf.rms_norm_eps),
        "window": llama_like.windows(hf)[layer],
    }


def _attention(hf: HFConfig, layer: int, is_kv_source: bool) -> Attention.Config:
    options, is_full = _options(hf, layer), hf.layer_types[layer] == "full_attention"
    v_norm = replace(options["qk_norm"], weight=False)
    from_keys = hf.attention_k_eq_v and is_full
    return Attention.Config(**options, v_norm=v_norm, values_from_keys=from_keys, is_kv_source=is_kv_source)


def _shared_kv(hf: HFConfig, layer: int, kv_source_layer: int) -> SharedKVAttention.Config:
    return SharedKVAttention.Config(**_options(hf, layer), kv_source_layer=kv_source_layer)


def _mlp(hf: HFConfig, shares_kv: bool) -> GatedMLP.Config | NormedMoE.Config:
    """The MLP of a layer, with experts in parallel if there are any; layers with shared KV may have it twice as wide."""
    d_mlp = hf.intermediate_size * (2 if hf.use_double_wide_mlp and shares_kv else 1)
    mlp = GatedMLP.Config(hf.hidden_size, d_mlp, hf.hidden_activation)
    n_experts, top_k, d_expert = hf.num_experts, hf.top_k_experts, hf.moe_intermediate_size
    if not hf.enable_moe_block:
        return mlp
    expert, router = replace(mlp, d_mlp=d_expert), SoftmaxRouter(renormalize=True)
    return NormedMoE.Config(expert, n_experts, top_k, router, shared=mlp, norm=llama_like.rms_norm(hf))


def _per_layer(hf: HFConfig) -> PerLayerEmbed.Config:
    d_layer = hf.hidden_size_per_layer_input
    norm = RMSNorm.Config(d_layer, hf.rms_norm_eps)
    return PerLayerEmbed.Config(hf.vocab_size_per_layer_input, hf.hidden_size, hf.num_hidden_layers, d_layer, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.", "blocks.{l}."
    return [
        *llama_like.outer_rows(tree),
        *llama_like.four_norm_rows(),
        *llama_like.attention_rows(),
        *llama_like.mlp_rows(),
        *_sparse_rows(tree),
        Row("model.embed_tokens_per_layer.weight", "per_layer.W_E", "v (n h) -> v n h"),
        Row("model.per_layer_model_projection.weight", "per_layer.W_proj", "(n h) m -> m n h"),
        Row("model.per_layer_projection_norm.weight", "per_layer.norm.w"),
        Row(source + "per_layer_input_gate.weight", target + "per_layer.W_gate", "h m -> m h"),
        Row(source + "per_layer_projection.weight", target + "per_layer.W_out", "m h -> h m"),
        Row(source + "post_per_layer_input_norm.weight", target + "per_layer_post.w"),
        Row(source + "layer_scalar", target + "scale"),
    ]


def _sparse_rows(tree: DecoderConfig) -> list[Row]:
    """Rows of the router, the experts, the parallel MLP, and their norms."""
    source, target, e = "model.layers.{l}.", "blocks.{l}.mlp.", moe.n_experts(tree)
    norms = {"pre": "", "post": "_post"}
    return [
        *(Row(f"{source}{x}_feedforward_layernorm_2.weight", f"{target}ln_experts{y}.w") for x, y in norms.items()),
        Row(source + "pre_feedforward_layernorm.weight", target + "ln_shared.w"),
        Row(source + "post_feedforward_layernorm_1.weight", target + "ln_shared_post.w"),
        Row(source + "router.scale", target + "ln_router.w"),
        Row(source + "router.proj.weight", target + "W_router", "e m -> m e"),
        Row(source + "router.per_expert_scale", target + "expert_scale"),
        Row(source + "experts.gate_up_proj", target + "experts.{e}.W_{x}", "e (x f) m -> m f", e=e, x=["gate", "in"]),
        Row(source + "experts.down_proj", target + "experts.{e}.W_out", "e m f -> f m", e=e),
        *classic.gated_mlp(source + "mlp.", target + "shared."),
    ]
