"""Command R7B (Cohere 2024, docs.cohere.com/docs/command-r7b): most layers local with rotary, the others without positions."""

from hooked_lm.components.block import SharedNormBlock
from hooked_lm.components.norm import LayerNorm
from hooked_lm.families import _llama_like as llama_like
from hooked_lm.families._llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._reader import HFConfig
from hooked_lm.families._rotary import rotary
from hooked_lm.models.config import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("sliding_window_pattern", "head_dim")  # layer_types say the same; the width of a head is a quotient


def config(hf: HFConfig) -> DecoderConfig:
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps, bias=False)
    turning = rotary(hf, hf.hidden_size // hf.num_attention_heads, adjacent_pairs=True)
    blocks = [
        SharedNormBlock.Config(
            attn=llama_like.attention(
                hf,
                rotary=None if window is None else turning,
                window=window,
                qkv_bias=hf.attention_bias,
                out_bias=hf.attention_bias,
            ),
            ln1=norm,
            mlp=llama_like.gated_mlp(hf),
        )
        for window in llama_like.windows(hf)
    ]
    return llama_like.around(hf, blocks, norm, logit_scale=hf.logit_scale)
