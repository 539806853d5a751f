"""Flint (RSI 2026): norms of queries and keys, attention sinks, positions in local layers only, and experts weighted by
sigmoids that are chosen without a correction."""

from dataclasses import replace

from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = moe.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    bias = hf.attention_bias
    attn = llama_like.attention(hf, qkv_bias=bias, out_bias=bias, qk_norm=llama_like.head_norm(hf), sinks=True)
    router = GroupedSigmoidRouter(renormalize=hf.norm_topk_prob, corrected=False, eps=0.0, keeps_weights=True)
    experts = moe.experts(hf, hf.num_experts, router, hf.moe_intermediate_size)
    experts = replace(experts, shared=replace(experts.expert, d_mlp=hf.shared_expert_intermediate_size))
    return moe.decoder(hf, llama_like.rotary_in_windows(hf, attn), moe.some_sparse(hf, experts, moe.every_nth(hf)))


def rows(tree: DecoderConfig) -> list[Row]:
    sinks = Row("model.layers.{l}.self_attn.softmax_offset", "blocks.{l}.attn.sinks")
    others = [*llama_like.rows(tree), *moe.sparse_rows(tree, shared="shared_expert")]
    return [*(row for row in others if row.target != sinks.target), sinks]
