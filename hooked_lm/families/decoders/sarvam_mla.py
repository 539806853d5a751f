"""Sarvam 105B (Sarvam AI 2026, huggingface.co/sarvamai/sarvam-105b): DeepSeek-V3 without a latent of the queries."""

from hooked_lm.families._shared.deepseek import rows
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families.decoders.deepseek_v3 import NO_EFFECT, config

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]
