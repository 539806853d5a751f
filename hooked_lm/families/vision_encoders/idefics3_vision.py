"""The vision tower of Idefics3 (Laurençon et al. 2024, arXiv:2408.12637)."""

from hooked_lm.families._shared.idefics_like import IGNORED, NO_EFFECT, PREFIX
from hooked_lm.families._shared.idefics_like import tower as config
from hooked_lm.families._shared.idefics_like import tower_rows as rows

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]
