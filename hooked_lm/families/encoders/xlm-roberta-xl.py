"""XLM-RoBERTa XL and XXL (Goyal et al. 2021, arXiv:2105.00572): norms before the sublayers, none after the embeddings."""

from dataclasses import replace

from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import ROBERTA
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import roberta
from hooked_lm.families.encoders.roberta import IGNORED, NO_EFFECT, PREFIX, RENAMED
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]


def config(hf: HFConfig) -> EncoderConfig:
    tree = bert_like.with_norms_before(hf, roberta.config(hf))
    return replace(tree, embed=replace(tree.embed, norm=None))


def rows(tree: EncoderConfig) -> list[Row]:
    norms = {"ln1": "attention.self_attn_layer_norm", "ln2": "LayerNorm"}
    return [*bert_like.rows(tree, ROBERTA, PREFIX, **norms), *classic.norm("roberta.encoder.LayerNorm", "ln_final")]
