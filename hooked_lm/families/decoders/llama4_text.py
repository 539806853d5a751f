"""Llama 4 (Meta 2025, ai.meta.com/blog/llama-4-multimodal-intelligence): rotary layers attend within chunks; layers without
rotary attend to all, with scores that grow with the position; the weights of experts multiply their inputs."""

from dataclasses import replace

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Chunks
from hooked_lm.components.attention.position_scale import PositionScale, PositionScaledAttention
from hooked_lm.components.experts.moe import InputWeightedMoE
from hooked_lm.components.experts.router import TopKSigmoidRouter
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# repeated in `no_rope_layers` and `moe_layers`; noise in training; for quantisation
NO_EFFECT = (
    *moe.NO_EFFECT,
    *("no_rope_layer_interval", "interleave_moe_layer_step", "router_jitter_noise", "for_llm_compressor"),
)


def config(hf: HFConfig) -> DecoderConfig:
    expert = llama_like.gated_mlp(hf)
    sparse = InputWeightedMoE.Config(
        expert, hf.num_local_experts, hf.num_experts_per_tok, TopKSigmoidRouter(), shared=expert
    )
    dense = replace(expert, d_mlp=hf.intermediate_size_mlp)
    layers, is_sparse = range(hf.num_hidden_layers), set(hf.moe_layers)
    mlps = [sparse if layer in is_sparse else dense for layer in layers]
    return moe.decoder(hf, [_attention(hf, layer) for layer in layers], mlps)


def _attention(hf: HFConfig, layer: int) -> Attention.Config:
    kind, size = hf.layer_types[layer], hf.attention_chunk_size
    if kind not in ("full_attention", "chunked_attention") or (kind == "chunked_attention" and not size):
        raise ValueError(
            f"layer_types[{layer}]={kind!r} with attention_chunk_size={size} is not supported; full_attention is, and "
            "chunked_attention with a size"
        )
    d_head, is_turned = llama_like.head_dim(hf), bool(hf.no_rope_layers[layer])
    attn = llama_like.attention(
        hf,
        rotary=rotary(hf, d_head, adjacent_pairs=True) if is_turned else None,
        qk_norm=RMSNorm.Config(d_head, hf.rms_norm_eps, weight=False) if hf.use_qk_norm and is_turned else None,
        rotary_first=True,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        position_bias=Chunks(size) if kind == "chunked_attention" else None,
    )
    scale = PositionScale(float(hf.attn_scale), hf.floor_scale, offset=1)
    is_scaled = hf.attn_temperature_tuning and not is_turned
    return PositionScaledAttention.Config(**vars(attn), position_scale=scale) if is_scaled else attn


def rows(tree: DecoderConfig) -> list[Row]:
    source, target, e = "model.layers.{l}.feed_forward.", "blocks.{l}.mlp.", moe.n_experts(tree)
    expert = target + "experts.{e}."
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *llama_like.attention_rows(),
        *classic.gated_mlp(source),
        Row(source + "router.weight", target + "W_router", "e m -> m e"),
        Row(source + "experts.gate_up_proj", expert + "W_{x}", "e m (x f) -> m f", e=e, x=["gate", "in"]),
        Row(source + "experts.down_proj", expert + "W_out", "e f m -> f m", e=e),
        *classic.gated_mlp(source + "shared_expert.", target + "shared."),
    ]
