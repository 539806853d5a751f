"""XLM-RoBERTa (Conneau et al. 2019, arXiv:1911.02116): RoBERTa for a hundred languages."""

from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import roberta
from hooked_lm.families.encoders.roberta import IGNORED, NO_EFFECT, PREFIX, RENAMED, rows
from hooked_lm.models.config.tree import EncoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]


def config(hf: HFConfig) -> EncoderConfig:
    return roberta.config(hf)
