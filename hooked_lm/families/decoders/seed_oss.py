"""Seed-OSS (ByteDance Seed 2025, huggingface.co/ByteDance-Seed/Seed-OSS-36B-Base): LLaMA with configurable biases."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]

PREPENDS_BOS = False


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_out_bias)
    return llama_like.decoder(hf, attn, mlp_bias=hf.mlp_bias)
