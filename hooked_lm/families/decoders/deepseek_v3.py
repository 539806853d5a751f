"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv:2412.19437): latent attention, expert choice with a correction bias."""

from hooked_lm.families._shared import deepseek, llama_like, moe
from hooked_lm.families._shared.deepseek import rows
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# An extra layer for multi-token prediction, which the next-token logits do not depend on.
IGNORED = (*llama_like.IGNORED, "model.layers.61.*")
NO_EFFECT = (*deepseek.NO_EFFECT, "num_mtp_layers", "num_nextn_predict_layers")


def config(hf: HFConfig) -> DecoderConfig:
    hf.require(head_dim=hf.qk_rope_head_dim)  # only the rotary embedding of transformers reads it
    experts = moe.deepseek_experts(hf, hf.n_routed_experts, hf.n_shared_experts)
    mlps = moe.some_sparse(hf, experts, moe.from_layer(hf.first_k_dense_replace))
    return moe.decoder(hf, deepseek.attention(hf, adjacent_pairs=hf.rope_interleave), mlps)
