"""RoBERTa (Liu et al. 2019, arXiv:1907.11692): BERT with positions that start after the pad token's id."""

from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.bert_like import IGNORED, NO_EFFECT, RENAMED, ROBERTA
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "roberta."


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    offset = hf.pad_token_id + 1
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings - offset,
        embed=bert_like.embed(hf, offset, n_types=hf.type_vocab_size),
        blocks=bert_like.blocks(hf, bert_like.attention(hf)),
        **bert_like.heads(hf, ROBERTA),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    return bert_like.rows(tree, ROBERTA, PREFIX)
