"""GLM-4.5 (GLM-4.5 Team 2025, arXiv:2508.06471): partial rotary, DeepSeek-V3's router, dense layers first."""

from dataclasses import replace

from hooked_lm.components.norm import RMSNorm
from hooked_lm.components.router import GroupedSigmoidRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.moe import rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
# Extra layers for multi-token prediction, which the next-token logits do not depend on.
IGNORED = (*llama_like.IGNORED, "model.layers.46.*", "model.layers.92.*")
NO_EFFECT = (*moe.NO_EFFECT, "num_mtp_layers", "num_nextn_predict_layers", "partial_rotary_factor")


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, partial=True, qkv_bias=hf.attention_bias)
    if hf.use_qk_norm:
        attn = replace(attn, qk_norm=RMSNorm.Config(attn.d_head, hf.rms_norm_eps))
    router = GroupedSigmoidRouter(hf.n_group, hf.topk_group, hf.norm_topk_prob, hf.routed_scaling_factor)
    experts = moe.experts(hf, hf.n_routed_experts, router, hf.moe_intermediate_size)
    shared = replace(experts.expert, d_mlp=hf.moe_intermediate_size * hf.n_shared_experts)
    first_sparse = hf.first_k_dense_replace
    mlps = moe.some_sparse(hf, replace(experts, shared=shared), lambda layer: layer >= first_sparse)
    return moe.decoder(hf, attn, mlps)
