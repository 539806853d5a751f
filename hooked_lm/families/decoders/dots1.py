"""dots.llm1 (rednote-hilab 2025, arXiv:2506.05767): Qwen3's attention, DeepSeek-V3's experts, dense layers first."""

from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.moe import rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# the window fields repeat `layer_types`; the last two have the same values in all these models
NO_EFFECT = (*moe.NO_EFFECT, "max_window_layers", "use_sliding_window", "scoring_func", "moe_layer_freq")


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(
        hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias, qk_norm=llama_like.head_norm(hf)
    )
    experts = moe.deepseek_experts(hf, hf.n_routed_experts or 1, hf.n_shared_experts)
    mlps = moe.some_sparse(hf, experts, moe.from_layer(hf.first_k_dense_replace))
    return moe.decoder(hf, llama_like.by_window(hf, attn), mlps)
