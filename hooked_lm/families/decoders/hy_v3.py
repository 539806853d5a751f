"""Hy3 (Tencent 2026, huggingface.co/tencent/Hy3-preview): queries and keys normalised per head, DeepSeek-V3's experts
without groups."""

from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# An extra layer for multi-token prediction, which the next-token logits do not depend on.
IGNORED = (*llama_like.IGNORED, "model.layers.80.*")
# The precision of some steps; the last field repeats `mlp_layer_types`.
NO_EFFECT = (*moe.NO_EFFECT, "enable_*fp32*", "num_nextn_predict_layers", "first_k_dense_replace")


def config(hf: HFConfig) -> DecoderConfig:
    hf.ignored_by_transformers(qk_norm=True, route_norm=True, expert_hidden_dim=hf.moe_intermediate_size)
    attn = llama_like.attention(
        hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias, qk_norm=llama_like.head_norm(hf)
    )
    router = GroupedSigmoidRouter(scale=hf.router_scaling_factor)
    experts = moe.experts(hf, hf.num_experts, router, hf.moe_intermediate_size, hf.num_shared_experts, hf.mlp_bias)
    return moe.decoder(hf, attn, moe.some_sparse(hf, experts, moe.of_sparse_type(hf), hf.mlp_bias))


def rows(tree: DecoderConfig) -> list[Row]:
    sparse = moe.sparse_rows(tree, shared="shared_mlp", router="router.gate", correction="expert_bias")
    return [*llama_like.rows(tree), *sparse]
