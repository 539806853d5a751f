"""Shared code for DeBERTa: the embeddings, the relative positions, the heads, and the tensor names."""

from dataclasses import replace

from hooked_lm.components.attention.disentangled import DisentangledAttention, RelativeEmbed
from hooked_lm.components.blocks.post_norm import PostNormPart
from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed, TokenTypeEmbed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.bert_like import Names
from hooked_lm.families._shared.deberta_like import identities as identities
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

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


def encoder(
    hf: HFConfig, blocks: tuple[PostNormPart.Config, ...], rel_embed: RelativeEmbed.Config | None
) -> EncoderConfig:
    """The config tree with these layers and this table of relative positions."""
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
        blocks=blocks,
        rel_embed=rel_embed,
        layout=layout,
        **heads,
    )


def table(hf: HFConfig, n_buckets: int = -1, norm_eps: float | None = None) -> RelativeEmbed.Config | None:
    """The table of relative positions that all layers share; None without relative attention."""
    longest = hf.max_relative_positions if hf.max_relative_positions > 0 else hf.max_position_embeddings
    if not hf.relative_attention:
        return None
    return RelativeEmbed.Config(hf.hidden_size, longest, n_buckets if n_buckets > 0 else None, norm_eps)


def attention(hf: HFConfig, d_head: int, **options: bool) -> DisentangledAttention.Config:
    """The attention of a layer."""
    kinds, is_relative = hf.pos_att_type or [], hf.relative_attention
    if unknown := set(kinds) - {"c2p", "p2c"}:
        raise ValueError(f"pos_att_type names {sorted(unknown)}; 'c2p' and 'p2c' are supported")
    if len(set(kinds)) < len(kinds):  # they would be in the scale twice, in the first version alone
        raise ValueError(f"pos_att_type={kinds} names a kind twice")
    return DisentangledAttention.Config(
        hf.hidden_size,
        hf.num_attention_heads,
        d_head,
        scale=(d_head * (1 + len(kinds))) ** -0.5,
        c2p=is_relative and "c2p" in kinds,
        p2c=is_relative and "p2c" in kinds,
        **options,
    )


def rows(tree: EncoderConfig) -> list[Row]:
    """Rows of all weights but those into attention."""
    found = bert_like.rows(tree, LAYOUTS[tree.layout], PREFIX)
    return [
        *(row for row in found if "attention.self" not in row.source),
        Row("deberta.encoder.rel_embeddings.weight", "rel_embed.W_rel"),
    ]
