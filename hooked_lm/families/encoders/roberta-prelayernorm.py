"""RoBERTa with norms before the sublayers (Wettig et al. 2022, arXiv:2202.08005), as fairseq trains it."""

from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import ROBERTA
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import roberta
from hooked_lm.families.encoders.roberta import IGNORED, NO_EFFECT, RENAMED
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "roberta_prelayernorm."


def config(hf: HFConfig) -> EncoderConfig:
    return bert_like.with_norms_before(hf, roberta.config(hf))


def rows(tree: EncoderConfig) -> list[Row]:
    norms = {"ln1": "attention.LayerNorm", "ln2": "intermediate.LayerNorm"}
    return [*bert_like.rows(tree, ROBERTA, PREFIX, **norms), *classic.norm(PREFIX + "LayerNorm", "ln_final")]
