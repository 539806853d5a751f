"""Idefics3 (Laurençon et al. 2024, arXiv:2408.12637)."""

from hooked_lm.components.vision.pixels import ImageRows
from hooked_lm.families._shared import idefics_like
from hooked_lm.families._shared.idefics_like import IGNORED, NO_EFFECT, PREFIX
from hooked_lm.families._shared.idefics_like import composite_rows as rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import VisionLanguageConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> VisionLanguageConfig:
    return idefics_like.composite(hf, ImageRows())
