"""Code World Model (FAIR CodeGen team, Meta 2025, arXiv:2510.02387): Llama 3 with windows in most layers."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    return llama_like.decoder(hf, llama_like.attention(hf), llama_like.windows(hf), hf.mlp_bias)
