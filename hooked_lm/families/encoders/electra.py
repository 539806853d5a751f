"""ELECTRA (Clark et al. 2020, arXiv:2003.10555): generators predict masked tokens, discriminators detect replaced tokens."""

from typing import Any

from hooked_lm.components.heads import MLMHead, TokenClassifier
from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.bert_like import IGNORED, RENAMED, Names
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "electra."
NO_EFFECT = (*bert_like.NO_EFFECT, "embedding_size")
HEADS = Names(
    mlm="generator_predictions.dense",
    mlm_norm="generator_predictions.LayerNorm",
    decoder="generator_lm_head",
    bias="generator_lm_head.bias",
    untied_bias="generator_lm_head.bias",
)
DISCRIMINATOR = "discriminator_predictions."


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    d_embed, d_model = hf.embedding_size, hf.hidden_size
    embed = bert_like.embed(hf, n_types=hf.type_vocab_size, d_embed=d_embed)
    heads: dict[str, Any] = bert_like.heads(hf, HEADS, d_embed=d_embed, text="gelu")
    if hf.holds(DISCRIMINATOR + "dense.weight"):
        heads["token_classifier"] = TokenClassifier.Config(
            d_model, 1, MLMHead.Config(d_model, d_model, hf.hidden_act), single=True
        )
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=embed if d_embed == d_model else bert_like.projected(embed, d_model),
        blocks=bert_like.blocks(hf, bert_like.attention(hf)),
        **heads,
    )


def rows(tree: EncoderConfig) -> list[Row]:
    if tree.token_classifier is not None and tree.token_classifier.single:
        heads = [
            *bert_like.linear(DISCRIMINATOR + "dense", "token_classifier.transform"),
            *bert_like.linear(DISCRIMINATOR + "dense_prediction", "token_classifier"),
        ]
    else:
        heads = bert_like.head_rows(tree, HEADS, PREFIX)
    return [
        *bert_like.embedding_rows("electra.embeddings."),
        *bert_like.projection_rows("electra.embeddings_project"),
        *bert_like.layer_rows("electra.encoder.layer.{l}."),
        *heads,
    ]
