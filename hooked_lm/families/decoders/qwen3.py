"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): queries and keys are normalised per head."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = ("use_sliding_window", "max_window_layers")  # repeat `layer_types` and `sliding_window`


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(
        hf,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=llama_like.head_norm(hf),
    )
    return llama_like.decoder(hf, attn, llama_like.windows(hf))
