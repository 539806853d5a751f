"""CamemBERT (Martin et al. 2019, arXiv:1911.03894): RoBERTa for French."""

from hooked_lm.families.encoders.roberta import IGNORED, NO_EFFECT, PREFIX, RENAMED, config, rows

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]
