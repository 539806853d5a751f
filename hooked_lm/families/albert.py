"""ALBERT (Lan et al. 2019, arXiv:1909.11942): layers that share their weights, embeddings narrower than the stream."""

from hooked_lm.families import _bert_like as bert_like
from hooked_lm.families import _classic as classic
from hooked_lm.families._bert_like import IGNORED, NO_EFFECT, RENAMED, Names
from hooked_lm.families._reader import HFConfig
from hooked_lm.models.encoder_config import EncoderConfig
from hooked_lm.weights import Row, expand

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "albert."
HEADS = Names(
    mlm="predictions.dense",
    mlm_norm="predictions.LayerNorm",
    decoder="predictions.decoder",
    mlm_bias="predictions.bias",
    pooler="pooler",
    nsp="sop_classifier.classifier",
    text_dense=None,
)


def config(hf: HFConfig) -> EncoderConfig:
    n_layers, n_groups, per_group = hf.num_hidden_layers, hf.num_hidden_groups, hf.inner_group_num
    group_of = [int(layer / (n_layers / n_groups)) for layer in range(n_layers)]
    if set(group_of) != set(range(n_groups)):
        raise ValueError(f"num_hidden_groups={n_groups}: {n_layers} layers leave some of the groups without use")
    places = [(group, inner) for group in group_of for inner in range(per_group)]
    block = bert_like.blocks(hf, bert_like.attention(hf))[0]
    embed = bert_like.embed(hf, n_types=hf.type_vocab_size, d_embed=hf.embedding_size)
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=bert_like.projected(embed, hf.hidden_size),
        blocks=(block,) * len(places),
        shares=tuple(places),
        **bert_like.heads(hf, HEADS, mlm=hf.hidden_act),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    layers, shares = [], tree.shares or ()
    for group, inner in dict.fromkeys(shares):
        theirs = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{inner}."
        layers += expand(layer_rows(theirs), l=[shares.index((group, inner))])
    return [
        *bert_like.embedding_rows("albert.embeddings."),
        *bert_like.projection_rows("albert.encoder.embedding_hidden_mapping_in"),
        *layers,
        *bert_like.head_rows(tree, HEADS, PREFIX),
    ]


def layer_rows(theirs: str) -> list[Row]:
    """One set of weights."""
    attn = theirs + "attention."
    return [
        *classic.into_attention(attn + "query", attn + "key", attn + "value"),
        *classic.out_of_attention(attn + "dense"),
        *classic.norm(attn + "LayerNorm", "blocks.{l}.ln1"),
        *classic.into_mlp(theirs + "ffn"),
        *classic.out_of_mlp(theirs + "ffn_output"),
        *classic.norm(theirs + "full_layer_layer_norm", "blocks.{l}.ln2"),
    ]
