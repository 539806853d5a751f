"""LLaMA (Touvron et al. 2023, arXiv:2302.13971) and its successors up to Llama 3 (arXiv:2407.21783)."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias)
    return llama_like.decoder(hf, attn, mlp_bias=hf.mlp_bias)
