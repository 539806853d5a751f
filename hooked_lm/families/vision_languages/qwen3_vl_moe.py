"""Qwen3-VL with experts (Qwen Team 2025, arXiv:2511.21631)."""

from hooked_lm.families.decoders.qwen3_vl_moe_text import NO_EFFECT, adjusted_to_tensors
from hooked_lm.families.vision_languages.qwen3_vl import IGNORED, PREFIX, config, rows

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]
