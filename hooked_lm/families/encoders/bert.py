"""BERT (Devlin et al. 2018, arXiv:1810.04805), with heads for masked tokens, next sentences, texts, tokens and spans."""

from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.bert_like import IGNORED, NO_EFFECT, RENAMED, Names
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "bert."
HEADS = Names(
    mlm="cls.predictions.transform.dense",
    mlm_norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    bias="cls.predictions.bias",
    untied_bias="cls.predictions.decoder.bias",
    text_dense=None,
)


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=bert_like.embed(hf, n_types=hf.type_vocab_size),
        blocks=bert_like.blocks(hf, bert_like.attention(hf)),
        **bert_like.heads(hf, HEADS, mlm=hf.hidden_act),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    return bert_like.rows(tree, HEADS, PREFIX)
