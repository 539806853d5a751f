"""PLBART (Ahmad et al. 2021, arXiv:2103.06333): BART for programs and their descriptions."""

from hooked_lm.families.encoder_decoders.bart import IGNORED, NO_EFFECT, PREFIX, adjusted_to_tensors, config, rows

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]
