"""Ministral 8B (Mistral AI 2024, mistral.ai/news/ministraux): Mistral with windows in some layers only."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    return llama_like.decoder(hf, llama_like.attention(hf), llama_like.windows(hf))
