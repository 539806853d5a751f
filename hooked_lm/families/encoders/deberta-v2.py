"""DeBERTa v2 and v3 (He et al. 2020, arXiv:2006.03654; 2021, arXiv:2111.09543): attention to content and to relative position."""

from hooked_lm.components.attention.disentangled import RelativeEmbed
from hooked_lm.components.blocks.post_norm import PostNormPart
from hooked_lm.families._shared import bert_like, classic, deberta_like
from hooked_lm.families._shared.bert_like import RENAMED
from hooked_lm.families._shared.deberta_like import IGNORED, NO_EFFECT, PREFIX
from hooked_lm.families._shared.deberta_like.conv import ConvPostNormBlock
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]


def config(hf: HFConfig) -> EncoderConfig:
    return deberta_like.encoder(hf, blocks(hf), relative(hf))


def relative(hf: HFConfig) -> RelativeEmbed.Config | None:
    """The table of relative positions that all layers share."""
    norms = [kind.strip() for kind in str(hf.get("norm_rel_ebd", "none")).lower().split("|")]
    has_norm = "layer_norm" in norms
    table = deberta_like.table(hf, hf.get("position_buckets", -1), hf.layer_norm_eps if has_norm else None)
    if table is None and has_norm:
        raise ValueError(f"norm_rel_ebd={hf.norm_rel_ebd!r} without relative_attention: there is nothing to normalise")
    return table


def blocks(hf: HFConfig) -> tuple[PostNormPart.Config, ...]:
    """The layers; the first may have a convolution."""
    d_head = hf.get("attention_head_size", hf.hidden_size // hf.num_attention_heads)
    attn = deberta_like.attention(hf, d_head, shared=bool(hf.get("share_att_key", False)))
    plain, n_offsets = bert_like.blocks(hf, attn), hf.get("conv_kernel_size", 0)
    groups, act_fn = hf.get("conv_groups", 1), hf.get("conv_act", "tanh")
    if not n_offsets:
        return plain
    first = ConvPostNormBlock.Config(
        **vars(plain[0]), ln3=bert_like.layer_norm(hf), n_offsets=n_offsets, n_groups=groups, conv_act_fn=act_fn
    )
    return (first, *plain[1:])


def rows(tree: EncoderConfig) -> list[Row]:
    attn, conv = "deberta.encoder.layer.{l}.attention.self.", "deberta.encoder.conv."
    return [
        *deberta_like.rows(tree),
        *classic.norm("deberta.encoder.LayerNorm", "rel_embed"),
        *classic.into_attention(attn + "query_proj", attn + "key_proj", attn + "value_proj"),
        *classic.heads_in(attn + "pos_key_proj", "pos_K"),
        *classic.heads_in(attn + "pos_query_proj", "pos_Q"),
        Row(conv + "conv.weight", "blocks.0.W_conv", "o i k -> k i o"),
        Row(conv + "conv.bias", "blocks.0.b_conv"),
        *classic.norm(conv + "LayerNorm", "blocks.0.ln3"),
    ]
