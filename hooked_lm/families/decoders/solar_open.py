"""Solar Open (Upstage 2026, arXiv:2601.07022): plain attention, DeepSeek-V3's experts in all layers."""

from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.moe import rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# whole heads turn, and no layer is dense
NO_EFFECT = (*moe.NO_EFFECT, "partial_rotary_factor", "intermediate_size", "first_k_dense_replace")


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias)
    experts = moe.deepseek_experts(hf, hf.n_routed_experts, hf.n_shared_experts)
    return moe.decoder(hf, attn, [experts] * hf.num_hidden_layers)
