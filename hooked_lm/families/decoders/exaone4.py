"""EXAONE 4.0 (LG AI Research 2025, arXiv:2507.11407): norms after the sublayers; if most layers are local, the
full-attention layers have no positions."""

from dataclasses import replace

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = ("sliding_window_pattern",)  # repeats `layer_types`


def config(hf: HFConfig) -> DecoderConfig:
    norm, attn = llama_like.rms_norm(hf), llama_like.attention(hf, qk_norm=llama_like.head_norm(hf))
    block = PreNormBlock.Config(attn=attn, ln1_post=norm, mlp=llama_like.gated_mlp(hf), ln2_post=norm)
    blocks = [replace(block, attn=each) for each in llama_like.rotary_in_windows(hf, attn)]
    return llama_like.around(hf, blocks, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.outer_rows(tree),
        *llama_like.post_norm_rows(),
        *llama_like.attention_rows(),
        *llama_like.mlp_rows(),
    ]
