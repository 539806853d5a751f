"""The vision tower of SmolVLM (Marafioti et al. 2025, arXiv:2504.05299), as Idefics3."""

from hooked_lm.families._shared.idefics_like import IGNORED, NO_EFFECT, PREFIX
from hooked_lm.families._shared.idefics_like import tower as config
from hooked_lm.families._shared.idefics_like import tower_rows as rows

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]
