"""Mistral 7B (Jiang et al. 2023, arXiv:2310.06825)."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    return llama_like.decoder(hf, llama_like.attention(hf, window=hf.sliding_window))
