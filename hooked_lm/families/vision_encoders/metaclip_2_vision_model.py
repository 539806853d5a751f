"""The vision tower of MetaCLIP 2 (Chuang et al. 2025, arXiv:2507.22062), which is that of CLIP."""

from hooked_lm.families.vision_encoders.clip_vision_model import IGNORED, NO_EFFECT, PREFIX, config, rows

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]
