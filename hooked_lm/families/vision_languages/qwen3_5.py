"""Qwen3.5 (Qwen Team 2026) with images: a hybrid of attention and the gated delta rule, and the tower of Qwen3-VL without the
features of several depths."""

from hooked_lm.components.vision.image_rules import AxisPositions
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_encoders import qwen3_5_vision
from hooked_lm.families.vision_languages import qwen3_vl
from hooked_lm.families.vision_languages.qwen3_vl import PREFIX, rows
from hooked_lm.models.config.tree import VisionLanguageConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]

IGNORED = (*qwen3_vl.IGNORED, "mtp.*")  # of the prediction of several tokens


def config(hf: HFConfig) -> VisionLanguageConfig:
    sides, merger = qwen3_vl.sides(hf, (11, 11, 10)), qwen3_5_vision.config(hf.part("vision_config")).merger
    return VisionLanguageConfig(**sides, projector=merger, rules=(AxisPositions(),))
