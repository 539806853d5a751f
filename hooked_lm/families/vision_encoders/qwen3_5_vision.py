"""The vision tower of Qwen3.5, which is that of Qwen3-VL."""

from hooked_lm.families.vision_encoders.qwen3_vl_vision import IGNORED, NO_EFFECT, PREFIX, config, rows

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]
