"""A.X K2 (SK Telecom 2026): DeepSeek-V3.2 with gated norms, and gates of attention from the latent of queries."""

from dataclasses import replace

from hooked_lm.components.attention.gated import QueryGatedSparseLatentAttention
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.components.norms.norm import NormConfig
from hooked_lm.families._shared import deepseek, llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.axk2 import identities as identities
from hooked_lm.families.decoders.axk2.gated_norm import LowRankGatedNorm
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = (*deepseek.NO_EFFECT_OF_SPARSE, "moe_layer_freq")


def config(hf: HFConfig) -> DecoderConfig:
    n_groups, top_groups = (1 if n is None else n for n in (hf.n_group, hf.topk_group))
    router = GroupedSigmoidRouter(n_groups, top_groups, hf.norm_topk_prob, hf.routed_scaling_factor, fill=0.0)
    experts = moe.experts(hf, hf.n_routed_experts, router, hf.moe_intermediate_size, hf.n_shared_experts)
    attn = QueryGatedSparseLatentAttention.Config(**vars(deepseek.sparse_attention(hf, index_pairs=False)))
    tree = moe.decoder(hf, attn, moe.some_sparse(hf, experts, moe.of_sparse_type(hf)))
    gated = LowRankGatedNorm.Config(**vars(llama_like.rms_norm(hf)), d_gate=hf.gated_norm_rank)
    blocks = [replace(b, ln1=gated, ln2=gated if isinstance(b.mlp, MoE.Config) else b.ln2) for b in tree.blocks]
    return replace(tree, blocks=tuple(blocks))


def rows(tree: DecoderConfig) -> list[Row]:
    attn, source, target = tree.blocks[0].attn, "model.layers.{l}.", "blocks.{l}."
    parts = {"UQ": attn.d_head, "gate": attn.d_value}
    replaced = ("q_b_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight")
    found = [row for row in deepseek.rows(tree) if not row.source.endswith(replaced)]
    found.append(
        Row(source + "self_attn.q_b_proj.weight", target + "attn.W_{x}", "(n x) d -> n d x", x=parts, n=attn.n_heads)
    )
    for layer, block in enumerate(tree.blocks):
        norms = {"ln1": (block.ln1, "input_layernorm"), "ln2": (block.ln2, "post_attention_layernorm")}
        for ours, (norm, name) in norms.items():
            found += _norm_rows(f"model.layers.{layer}.{name}.", f"blocks.{layer}.{ours}.", norm)
    return found


def _norm_rows(source: str, target: str, norm: NormConfig) -> list[Row]:
    if not isinstance(norm, LowRankGatedNorm.Config):
        return [Row(source + "weight", target + "w")]
    return [
        Row(source + "norm.weight", target + "w"),
        Row(source + "W_down.weight", target + "W_down", "r m -> m r"),
        Row(source + "W_up.weight", target + "W_up", "m r -> r m"),
    ]
