"""Qwen2 (Yang et al. 2024, arXiv:2407.10671), and Qwen1.5 and Qwen2.5, which have the same architecture."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = ("use_sliding_window", "max_window_layers")  # repeat `layer_types` and `sliding_window`


def config(hf: HFConfig) -> DecoderConfig:
    return llama_like.decoder(hf, llama_like.attention(hf, qkv_bias=True), llama_like.windows(hf))
