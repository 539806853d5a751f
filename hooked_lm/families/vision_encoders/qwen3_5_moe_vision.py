"""The vision tower of Qwen3.5 with experts, which is that of Qwen3.5."""

from hooked_lm.families.vision_encoders.qwen3_5_vision import IGNORED, PREFIX, config, rows

__all__ = ["IGNORED", "PREFIX", "config", "rows"]
