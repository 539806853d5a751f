"""Qwen3.5 with experts (Qwen Team 2026) and images."""

from hooked_lm.families.decoders.qwen3_5_moe_text import adjusted_to_tensors
from hooked_lm.families.vision_languages.qwen3_5 import IGNORED, PREFIX, config, rows

__all__ = ["IGNORED", "PREFIX", "adjusted_to_tensors", "config", "rows"]
