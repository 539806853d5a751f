"""Helium (Kyutai 2025, huggingface.co/kyutai/helium-1-2b): LLaMA with adjacent rotary pairs."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    turn = rotary(hf, hf.head_dim, adjacent_pairs=True)
    return llama_like.decoder(
        hf, llama_like.attention(hf, rotary=turn, qkv_bias=hf.attention_bias), mlp_bias=hf.mlp_bias
    )
