"""Data2vec for text (Baevski et al. 2022, arXiv:2202.03555): RoBERTa, trained to predict its own contextual representations."""

from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.bert_like import ROBERTA
from hooked_lm.families.encoders.roberta import IGNORED, NO_EFFECT, RENAMED, config
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "data2vec_text."


def rows(tree: EncoderConfig) -> list[Row]:
    return bert_like.rows(tree, ROBERTA, PREFIX)
