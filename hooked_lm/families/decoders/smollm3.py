"""SmolLM3 (Bakouch et al. 2025, huggingface.co/blog/smollm3): some layers, usually every fourth, have no positions.

Yang et al. (2025, arXiv:2501.18795) proposed such layers.
"""

from dataclasses import replace

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False

# repeat `no_rope_layers`, `layer_types` and `sliding_window`
NO_EFFECT = ("no_rope_layer_interval", "use_sliding_window", "max_window_layers")


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias)
    tree = llama_like.decoder(hf, attn, llama_like.windows(hf), mlp_bias=hf.mlp_bias)
    turned = zip(tree.blocks, hf.no_rope_layers, strict=False)  # 1 for rotary; the list may be longer than the layers
    blocks = [replace(b, attn=replace(b.attn, rotary=attn.rotary if is_turned else None)) for b, is_turned in turned]
    return replace(tree, blocks=tuple(blocks))
