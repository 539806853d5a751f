"""The vision tower of Qwen3.5 (Qwen Team 2026), which is that of Qwen3-VL without the mergers of several depths."""

from dataclasses import replace

from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_encoders import qwen3_vl_vision
from hooked_lm.families.vision_encoders.qwen3_vl_vision import IGNORED, PREFIX, rows
from hooked_lm.models.config.tree import VisionConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> VisionConfig:
    hf.ignored_by_transformers(deepstack_visual_indexes=[])
    tree = qwen3_vl_vision.tower(hf)
    return replace(tree, merger=qwen3_vl_vision.merger(hf, tree))
