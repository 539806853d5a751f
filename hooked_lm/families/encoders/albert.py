"""ALBERT (Lan et al. 2019, arXiv:1909.11942): layers that share their weights, embeddings narrower than the stream."""

from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, RENAMED, Names
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "albert."
# unused fields of the first checkpoints
NO_EFFECT = (
    *bert_like.NO_EFFECT,
    *("down_scale_factor", "gap_size", "layers_to_keep", "net_structure_type", "num_memory_blocks"),
)
HEADS = Names(
    mlm="predictions.dense",
    mlm_norm="predictions.LayerNorm",
    decoder="predictions.decoder",
    bias="predictions.bias",
    untied_bias="predictions.decoder.bias",
    pooler="pooler",
    nsp="sop_classifier.classifier",
    text_dense=None,
)


def config(hf: HFConfig) -> EncoderConfig:
    n_layers, n_groups, per_group = hf.num_hidden_layers, hf.num_hidden_groups, hf.inner_group_num
    group_of = [int(layer / (n_layers / n_groups)) for layer in range(n_layers)]
    if set(group_of) != set(range(n_groups)):
        raise ValueError(f"num_hidden_groups={n_groups}: {n_layers} layers do not use all groups")
    shares = [(group, inner) for group in group_of for inner in range(per_group)]
    block = bert_like.blocks(hf, bert_like.attention(hf))[0]
    embed = bert_like.embed(hf, n_types=hf.type_vocab_size, d_embed=hf.embedding_size)
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=bert_like.projected(embed, hf.hidden_size),
        blocks=(block,) * len(shares),
        shares=tuple(shares),
        **bert_like.heads(hf, HEADS, d_embed=hf.embedding_size, mlm=hf.hidden_act),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    layers, shares = list[Row](), tree.shares or ()
    for group, inner in dict.fromkeys(shares):
        source = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{inner}."
        layers += layer_rows(source, f"blocks.{shares.index((group, inner))}.")
    return [
        *bert_like.embedding_rows("albert.embeddings."),
        *bert_like.projection_rows("albert.encoder.embedding_hidden_mapping_in"),
        *layers,
        *bert_like.head_rows(tree, HEADS, PREFIX),
    ]


def layer_rows(source: str, target: str) -> list[Row]:
    """Rows of one set of layer weights, for the first block that uses it."""
    attn = source + "attention."
    return [
        *classic.into_attention(attn + "query", attn + "key", attn + "value", target + "attn."),
        *classic.out_of_attention(attn + "dense", target + "attn."),
        *classic.norm(attn + "LayerNorm", target + "ln1"),
        *classic.into_mlp(source + "ffn", target + "mlp."),
        *classic.out_of_mlp(source + "ffn_output", target + "mlp."),
        *classic.norm(source + "full_layer_layer_norm", target + "ln2"),
    ]
