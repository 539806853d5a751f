"""GLM-4.5 (GLM-4.5 Team 2025, arXiv:2508.06471): partial rotary, DeepSeek-V3's router, dense layers first."""

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
    norm = llama_like.head_norm(hf) if hf.use_qk_norm else None
    attn = llama_like.attention(hf, partial=True, qkv_bias=hf.attention_bias, qk_norm=norm)
    experts = moe.deepseek_experts(hf, hf.n_routed_experts, hf.n_shared_experts)
    return moe.decoder(hf, attn, moe.some_sparse(hf, experts, moe.from_layer(hf.first_k_dense_replace)))
