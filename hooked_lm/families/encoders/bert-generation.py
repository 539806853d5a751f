"""BERT for generation (Rothe et al. 2019, arXiv:1907.12461), as an encoder: BERT without token types and pooler."""

from hooked_lm.components.embeddings.embed import Unembed
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, NO_EFFECT, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "bert."
EMBEDDING = "bert.embeddings.word_embeddings.weight"


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    has_head, tied = hf.holds("lm_head.bias"), hf.tie_word_embeddings
    if has_head and not tied:
        raise ValueError("tie_word_embeddings=False: an unembedding with an unused second bias is not supported")
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=bert_like.embed(hf),
        blocks=bert_like.blocks(hf, bert_like.attention(hf)),
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, bias=True, tied=True) if has_head else None,
    )


def rows(tree: EncoderConfig) -> list[Row]:
    return [
        *bert_like.embedding_rows("bert.embeddings."),
        *bert_like.layer_rows("bert.encoder.layer.{l}."),
        classic.head("lm_head.decoder", tree, EMBEDDING)[0],
        Row("lm_head.bias", "unembed.b_U"),
        Row("lm_head.decoder.bias", "unembed.b_U, repeated", tied="lm_head.bias"),
    ]
