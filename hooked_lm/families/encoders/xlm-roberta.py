"""XLM-RoBERTa (Conneau et al. 2019, arXiv:1911.02116): RoBERTa for a hundred languages."""

from hooked_lm.families.encoders.roberta import IGNORED, NO_EFFECT, PREFIX, RENAMED, config, rows

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]
