"""Mistral Small 4 (Mistral AI 2026): latent attention whose late queries have larger scores, and experts by a softmax."""

from hooked_lm.components.attention.position_scale import PositionScaledLatentAttention
from hooked_lm.components.experts.router import GroupedSoftmaxRouter
from hooked_lm.families._shared import deepseek, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import position_scaled
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = deepseek.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    if hf.num_experts_per_tok > hf.topk_group * hf.n_routed_experts // hf.n_group:
        raise ValueError(
            f"num_experts_per_tok={hf.num_experts_per_tok}: topk_group={hf.topk_group} groups have fewer experts"
        )
    hf, scale = position_scaled(hf)
    d_head, parameters = hf.qk_nope_head_dim + hf.qk_rope_head_dim, dict(hf.rope_parameters)
    hf.require(head_dim=d_head)  # only the rotary embedding of transformers reads it
    if int(d_head * parameters.pop("partial_rotary_factor", 1.0)) != hf.qk_rope_head_dim:
        raise ValueError(f"partial_rotary_factor must be qk_rope_head_dim / {d_head}, the share of a head with rotary")
    attn = deepseek.attention(hf.changed(rope_parameters=parameters), adjacent_pairs=hf.rope_interleave)
    router = GroupedSoftmaxRouter(
        hf.n_group,
        hf.topk_group,
        hf.routed_scaling_factor,
        by_pairs=True,
        renormalize=hf.norm_topk_prob,
        in_fp32=False,
    )
    experts = moe.experts(hf, hf.n_routed_experts, router, hf.moe_intermediate_size, hf.n_shared_experts)
    mlps = moe.some_sparse(hf, experts, moe.from_layer(hf.first_k_dense_replace))
    return moe.decoder(hf, PositionScaledLatentAttention.Config(**vars(attn), position_scale=scale), mlps)


def rows(tree: DecoderConfig) -> list[Row]:
    source, expert, e = "model.layers.{l}.mlp.experts.", "blocks.{l}.mlp.experts.{e}.", moe.n_experts(tree)
    return [
        *(row for row in deepseek.rows(tree) if "experts.{e}" not in row.source),
        Row(source + "gate_up_proj", expert + "W_{x}", "e (x f) m -> m f", e=e, x=["gate", "in"]),
        Row(source + "down_proj", expert + "W_out", "e m f -> f m", e=e),
    ]
