"""Ministral 3 (Mistral AI 2025, mistral.ai/news/mistral-3): the scores of late queries are multiplied by a factor."""

from hooked_lm.components.attention.position_scale import PositionScaledAttention
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import position_scaled
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    hf, scale = position_scaled(hf)
    attn = llama_like.attention(hf, window=hf.sliding_window)
    return llama_like.decoder(hf, PositionScaledAttention.Config(**vars(attn), position_scale=scale))
