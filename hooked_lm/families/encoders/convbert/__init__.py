"""ConvBERT (Jiang et al. 2020, arXiv:2008.02496): an ELECTRA in which half of the heads convolve, with kernels from the text."""

from dataclasses import replace

from hooked_lm.components.grouped import GroupedMLP
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders.convbert import identities as identities
from hooked_lm.families.encoders.convbert.mixed import MixedAttention
from hooked_lm.families.encoders.electra import HEADS, NO_EFFECT
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "convbert."


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    d_embed, d_model, groups = hf.embedding_size, hf.hidden_size, hf.num_groups
    n_heads = max(hf.num_attention_heads // hf.head_ratio, 1)
    blocks = bert_like.blocks(hf, MixedAttention.Config(d_model, n_heads, d_model // n_heads // 2, hf.conv_kernel_size))
    if groups > 1:
        mlp = GroupedMLP.Config(d_model, hf.intermediate_size, hf.hidden_act, n_groups_in=groups, n_groups_out=groups)
        blocks = tuple(replace(block, mlp=mlp) for block in blocks)
    embed = bert_like.embed(hf, n_types=hf.type_vocab_size, d_embed=d_embed)
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=embed if d_embed == d_model else bert_like.projected(embed, d_model),
        blocks=blocks,
        **bert_like.heads(hf, HEADS, d_embed=d_embed, text=hf.hidden_act),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    layer, block = PREFIX + "encoder.layer.{l}.", "blocks.{l}."
    attn, conv, n = layer + "attention.self.", block + "attn.conv.", tree.blocks[0].attn.n_heads
    both = ["W_O", "conv.W_O"]
    return [
        *bert_like.embedding_rows(PREFIX + "embeddings."),
        *bert_like.projection_rows(PREFIX + "embeddings_project"),
        *classic.into_attention(attn + "query", attn + "key", attn + "value"),
        Row(attn + "key_conv_attn_layer.depthwise.weight", conv + "W_depth", "m 1 o -> o m"),
        Row(attn + "key_conv_attn_layer.pointwise.weight", conv + "W_K", "(n h) m 1 -> n m h"),
        Row(attn + "key_conv_attn_layer.bias", conv + "b_K", "(n h) 1 -> n h"),
        Row(attn + "conv_kernel_layer.weight", conv + "W_kernel", "(k o) (n h) -> n h k o", k=n, n=n),
        Row(attn + "conv_kernel_layer.bias", conv + "b_kernel", "(k o) -> k o"),
        *classic.heads_in(attn + "conv_out_layer", "V", conv),
        Row(layer + "attention.output.dense.weight", block + "attn.{x}", "m (x n h) -> n h m", x=both, n=n),
        Row(layer + "attention.output.dense.bias", block + "attn.b_O"),
        *classic.norm(layer + "attention.output.LayerNorm", block + "ln1"),
        *classic.into_mlp(layer + "intermediate.dense"),
        *classic.out_of_mlp(layer + "output.dense"),
        Row(layer + "intermediate.dense.weight", block + "mlp.W_in_groups"),
        Row(layer + "output.dense.weight", block + "mlp.W_out_groups"),
        *classic.norm(layer + "output.LayerNorm", block + "ln2"),
        *bert_like.head_rows(tree, HEADS, PREFIX),
    ]
