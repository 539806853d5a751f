"""Qwen2-VL (Wang et al. 2024, arXiv:2409.12191): a tower with rotary positions, a merger of squares of patches, and Qwen2 with
rotary positions on three axes."""

from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import qwen_tower
from hooked_lm.families._shared.qwen_tower import IGNORED, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionLanguageConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = ""


def config(hf: HFConfig) -> VisionLanguageConfig:
    return qwen_tower.with_text(hf, LayerNorm.Config, hf.vision_config["hidden_size"])


def rows(tree: VisionLanguageConfig) -> list[Row]:
    return qwen_tower.rows_with_text(tree)
