"""MetaCLIP 2 (Chuang et al. 2025, arXiv:2507.22062): CLIP, whose end token is the one that the config names."""

from hooked_lm.families._shared import dual_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.dual_encoders import clip
from hooked_lm.families.dual_encoders.clip import IGNORED, NO_EFFECT, PREFIX, rows
from hooked_lm.models.config.tree import DualEncoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DualEncoderConfig:
    return clip.pair(hf, dual_like.text_part(hf, NO_EFFECT).eos_token_id)
