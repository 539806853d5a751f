"""Megatron-BERT (Shoeybi et al. 2019, arXiv:1909.08053): norms before the sublayers, none after the embeddings."""

from dataclasses import replace

from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import bert
from hooked_lm.families.encoders.bert import HEADS, IGNORED, NO_EFFECT, PREFIX, RENAMED
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]


def config(hf: HFConfig) -> EncoderConfig:
    tree = bert_like.with_norms_before(hf, bert.config(hf))
    return replace(tree, embed=replace(tree.embed, norm=None))


def rows(tree: EncoderConfig) -> list[Row]:
    found = bert_like.rows(tree, HEADS, PREFIX, ln1="attention.ln", ln2="ln")
    return [*found, *classic.norm("bert.encoder.ln", "ln_final")]
