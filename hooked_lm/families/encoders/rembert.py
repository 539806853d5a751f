"""RemBERT (Chung et al. 2020, arXiv:2010.12821): narrow embeddings, and a wide unembedding that is not tied to them."""

from dataclasses import replace

from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.bert_like import IGNORED, NO_EFFECT, RENAMED, Names
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "rembert."
HEADS = Names(
    mlm="cls.predictions.dense",
    mlm_norm="cls.predictions.LayerNorm",
    decoder="cls.predictions.decoder",
    bias="cls.predictions.decoder.bias",
    untied_bias="cls.predictions.decoder.bias",
    text_dense=None,
)


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    heads = bert_like.heads(hf, HEADS, d_embed=hf.output_embedding_size, mlm=hf.hidden_act)
    if "unembed" in heads:  # never tied, regardless of `tie_word_embeddings`
        heads["unembed"] = replace(heads["unembed"], tied=False)
    embed = bert_like.embed(hf, n_types=hf.type_vocab_size, d_embed=hf.input_embedding_size)
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=bert_like.projected(embed, hf.hidden_size),
        blocks=bert_like.blocks(hf, bert_like.attention(hf)),
        **heads,
    )


def rows(tree: EncoderConfig) -> list[Row]:
    projection = bert_like.projection_rows("rembert.encoder.embedding_hidden_mapping_in")
    return [*bert_like.rows(tree, HEADS, PREFIX), *projection]
