"""DINOv2 with registers (Darcet et al. 2023, arXiv:2309.16588): positions that belong to no patch."""

from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.vision_encoders import dinov2
from hooked_lm.families.vision_encoders.dinov2 import IGNORED, NO_EFFECT
from hooked_lm.models.config.tree import VisionConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = "dinov2_with_registers."


def config(hf: HFConfig) -> VisionConfig:
    return dinov2.tower(hf, True, hf.num_register_tokens, antialias=True)


def rows(tree: VisionConfig) -> list[Row]:
    return dinov2.tower_rows(tree, PREFIX)
