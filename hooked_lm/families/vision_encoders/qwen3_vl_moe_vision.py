"""The vision tower of Qwen3-VL with experts, which is that of Qwen3-VL."""

from hooked_lm.families.vision_encoders.qwen3_vl_vision import IGNORED, PREFIX, config, rows

__all__ = ["IGNORED", "PREFIX", "config", "rows"]
