"""DeBERTa v2 and v3 (He et al. 2020, arXiv:2006.03654; 2021, arXiv:2111.09543): attention to content and to relative position."""

from dataclasses import replace
from typing import Any

from hooked_lm.components.attention.disentangled import DisentangledAttention, RelativeEmbed
from hooked_lm.components.blocks.conv import ConvPostNormBlock
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embed import Embed
from hooked_lm.components.encoder_embed import EncoderEmbed, TokenTypeEmbed
from hooked_lm.components.pos_embed import PosEmbed
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import RENAMED, Names
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "deberta."
# training heads of discriminators, and position embeddings that are not used
IGNORED = (*bert_like.IGNORED, "mask_predictions.*", "*embeddings.position_embeddings.*")
NO_EFFECT = (*bert_like.NO_EFFECT, "legacy", "cls_dropout", "pooler_hidden_act", "pooler_hidden_size")
CLASSIFIERS = {"text_dense": "pooler.dense", "text_out": "classifier", "pooler": "pooler.dense"}
OLD_HEADS = Names(
    mlm="cls.predictions.transform.dense",
    mlm_norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    bias="cls.predictions.bias",
    untied_bias="cls.predictions.decoder.bias",
    **CLASSIFIERS,
)
NEW_HEADS = Names(
    mlm="lm_predictions.lm_head.dense",
    mlm_norm="lm_predictions.lm_head.LayerNorm",
    decoder="lm_predictions.lm_head.decoder",
    bias="lm_predictions.lm_head.bias",
    untied_bias="lm_predictions.lm_head.bias",
    **CLASSIFIERS,
)
LAYOUTS = (OLD_HEADS, NEW_HEADS)


def config(hf: HFConfig) -> EncoderConfig:
    d_model, n_ctx = hf.hidden_size, hf.max_position_embeddings
    if hf.get("embedding_size", d_model) != d_model:
        raise ValueError(f"embedding_size={hf.embedding_size}: embeddings narrower than hidden_size are not supported")
    if hf.pooler_hidden_size != d_model:
        raise ValueError(f"pooler_hidden_size={hf.pooler_hidden_size} differs from hidden_size, {d_model}")
    norm, n_types = bert_like.layer_norm(hf), hf.type_vocab_size
    layout = int(hf.holds(LAYOUTS[1].mlm + ".weight"))
    heads = bert_like.heads(hf, LAYOUTS[layout], mlm=hf.hidden_act, text=hf.pooler_hidden_act)
    if layout == 1:  # always tied, regardless of `tie_word_embeddings`
        heads["unembed"] = replace(heads["unembed"], tied=True)
    return EncoderConfig(
        n_ctx=n_ctx,
        embed=EncoderEmbed.Config(
            Embed.Config(hf.vocab_size, d_model),
            PosEmbed.Config(n_ctx, d_model) if hf.position_biased_input else None,
            TokenTypeEmbed.Config(n_types, d_model) if n_types else None,
            norm,
        ),
        blocks=blocks(hf),
        rel_embed=relative(hf),
        layout=layout,
        **heads,
    )


def relative(hf: HFConfig) -> RelativeEmbed.Config | None:
    """The table of relative positions that all layers share."""
    norms = [kind.strip() for kind in str(hf.get("norm_rel_ebd", "none")).lower().split("|")]
    n_buckets, longest = hf.get("position_buckets", -1), hf.max_relative_positions
    if not hf.relative_attention:
        if "layer_norm" in norms:
            raise ValueError(
                f"norm_rel_ebd={hf.norm_rel_ebd!r} without relative_attention: there is nothing to normalise"
            )
        return None
    return RelativeEmbed.Config(
        hf.hidden_size,
        longest if longest > 0 else hf.max_position_embeddings,
        n_buckets if n_buckets > 0 else None,
        hf.layer_norm_eps if "layer_norm" in norms else None,
    )


def blocks(hf: HFConfig) -> tuple[PostNormBlock.Config, ...]:
    """The layers; the first may have a convolution."""
    d_model, n_heads, kinds = hf.hidden_size, hf.num_attention_heads, hf.pos_att_type or []
    if unknown := set(kinds) - {"c2p", "p2c"}:
        raise ValueError(f"pos_att_type names {sorted(unknown)}; 'c2p' and 'p2c' are supported")
    d_head, is_relative = hf.get("attention_head_size", d_model // n_heads), hf.relative_attention
    attn: Any = DisentangledAttention.Config(
        d_model,
        n_heads,
        d_head,
        scale=(d_head * (1 + len(set(kinds)))) ** -0.5,
        c2p=is_relative and "c2p" in kinds,
        p2c=is_relative and "p2c" in kinds,
        shared=bool(hf.get("share_att_key", False)),
    )
    plain, n_offsets = bert_like.blocks(hf, attn), hf.get("conv_kernel_size", 0)
    groups, act_fn = hf.get("conv_groups", 1), hf.get("conv_act", "tanh")
    if not n_offsets:
        return plain
    first = ConvPostNormBlock.Config(
        **vars(plain[0]), ln3=bert_like.layer_norm(hf), n_offsets=n_offsets, n_groups=groups, conv_act_fn=act_fn
    )
    return (first, *plain[1:])


def rows(tree: EncoderConfig) -> list[Row]:
    source = "deberta.encoder.layer.{l}."
    attn, conv = source + "attention.self.", "deberta.encoder.conv."
    return [
        *bert_like.embedding_rows("deberta.embeddings."),
        Row("deberta.encoder.rel_embeddings.weight", "rel_embed.W_rel"),
        *classic.norm("deberta.encoder.LayerNorm", "rel_embed"),
        *classic.into_attention(attn + "query_proj", attn + "key_proj", attn + "value_proj"),
        *classic.heads_in(attn + "pos_key_proj", "pos_K"),
        *classic.heads_in(attn + "pos_query_proj", "pos_Q"),
        *classic.out_of_attention(source + "attention.output.dense"),
        *classic.norm(source + "attention.output.LayerNorm", "blocks.{l}.ln1"),
        *classic.into_mlp(source + "intermediate.dense"),
        *classic.out_of_mlp(source + "output.dense"),
        *classic.norm(source + "output.LayerNorm", "blocks.{l}.ln2"),
        Row(conv + "conv.weight", "blocks.0.W_conv", "o i k -> k i o"),
        Row(conv + "conv.bias", "blocks.0.b_conv"),
        *classic.norm(conv + "LayerNorm", "blocks.0.ln3"),
        *bert_like.head_rows(tree, LAYOUTS[tree.layout], PREFIX),
    ]
