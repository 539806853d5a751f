"""GPT-SW3 (Ekgren et al. 2023, arXiv:2305.12987): GPT-2 under its own name, trained on Nordic languages."""

from hooked_lm.families.decoders.gpt2 import IGNORED, NO_EFFECT, PREFIX, config, rows

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]
