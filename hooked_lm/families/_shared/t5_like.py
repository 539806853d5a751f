"""Shared code for T5-like models: RMS norms before sublayers, relative position biases, and the tensor names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import SharedBias
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.cross import PreNormCrossBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.mlp import MLP, GatedMLP, MLPConfig
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.seq2seq import GENERATION
from hooked_lm.models.config.tree import EncoderDecoderConfig, StackConfig
from hooked_lm.weights import Row, expand

PREFIX = ""
# a weight in old files that T5 does not use
IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
# initialisation, unused fields of old files, and `feed_forward_proj`, which other fields repeat
NO_EFFECT = (*GENERATION, "initializer_factor", *("n_positions", "scalable_attention"), "feed_forward_proj")
N_CTX = 2**20  # relative positions set no limit; training used shorter texts


def mlp(hf: HFConfig) -> MLPConfig:
    """The MLP of a layer."""
    kind = GatedMLP if hf.is_gated_act else MLP
    return kind.Config(hf.d_model, hf.d_ff, hf.dense_act_fn, bias=False)


def relative_bias(hf: HFConfig, bidirectional: bool) -> RelativeBias.Config:
    """The bias on the scores per bucket of distances."""
    return RelativeBias.Config(
        hf.num_heads, hf.relative_attention_num_buckets, hf.relative_attention_max_distance, bidirectional
    )


def encoder_decoder(hf: HFConfig, ff: MLPConfig, scale: float, shared_bias: bool = True) -> EncoderDecoderConfig:
    """The config tree; `scale` multiplies the logits.

    With `shared_bias` all layers of the encoder share one position bias, and all layers of the decoder another.
    """
    sizes = {"d_model": hf.d_model, "n_heads": hf.num_heads, "d_head": hf.d_kv, "scale": 1.0}
    norm = RMSNorm.Config(hf.d_model, hf.layer_norm_epsilon)
    biases = {bidirectional: relative_bias(hf, bidirectional) for bidirectional in (True, False)}

    def attn(causal: bool) -> Attention.Config:
        return Attention.Config(
            **sizes, position_bias=SharedBias() if shared_bias else biases[not causal], causal=causal
        )

    def stack(block: Any, n: int, bidirectional: bool) -> StackConfig:
        return StackConfig((block,) * n, rel_pos_bias=biases[bidirectional] if shared_bias else None, ln_final=norm)

    cross = CrossAttention.Config(**sizes)
    encoder = PreNormBlock.Config(attn=attn(causal=False), ln1=norm, mlp=ff, ln2=norm)
    decoder = PreNormCrossBlock.Config(attn=attn(causal=True), ln1=norm, cross_attn=cross, ln2=norm, mlp=ff, ln3=norm)
    return EncoderDecoderConfig(
        n_ctx=N_CTX,
        embed=Embed.Config(hf.vocab_size, hf.d_model),
        encoder=stack(encoder, hf.num_layers, bidirectional=True),
        decoder=stack(decoder, hf.num_decoder_layers, bidirectional=False),
        unembed=Unembed.Config(hf.d_model, hf.vocab_size, scale=scale, tied=hf.tie_word_embeddings),
    )


def adjusted_to_tensors(tree: EncoderDecoderConfig, tensors: Mapping[str, Tensor]) -> EncoderDecoderConfig:
    """The tree, untied if the tensors hold an unembedding that differs from the embedding.

    T5 since 1.1, mT5 and umT5 have one, although their configs say that it is tied.
    """
    own = tree.unembed.tied and "lm_head.weight" in tensors
    if own and not torch.equal(tensors["lm_head.weight"], tensors["shared.weight"]):
        return replace(tree, unembed=replace(tree.unembed, tied=False))
    return tree


def attention_rows(source: str, target: str) -> list[Row]:
    """Rows of the four weights of self-attention or cross-attention."""
    q, k, v, o = (source + x for x in "qkvo")
    return [*classic.into_attention(q, k, v, target), *classic.out_of_attention(o, target)]


def mlp_rows(cfg: MLPConfig, source: str, target: str) -> list[Row]:
    """Rows of the MLP, gated or not."""
    names = {"wi": "in"} if isinstance(cfg, MLP.Config) else {"wi_0": "gate", "wi_1": "in"}
    names |= {"wo": "out"}
    return [row for name, x in names.items() for row in classic.linear(source + name, target, x)]


def outer_rows(tree: EncoderDecoderConfig) -> list[Row]:
    """Rows of the embeddings, final norms and unembedding.

    Files may repeat a shared embedding for the encoder and for the decoder.
    """
    shared, of_encoder, of_decoder = "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
    if tree.decoder_embed is None:
        embeds = [
            Row(shared, "embed.W_E"),
            Row(of_encoder, "encoder.embed.W_E", tied=shared),
            Row(of_decoder, "decoder.embed.W_E", tied=shared),
        ]
    else:
        embeds = [Row(of_encoder, "embed.W_E"), Row(of_decoder, "decoder_embed.W_E"), Row(shared, "spare_embed.W_E")]
    return [
        *embeds,
        Row("encoder.final_layer_norm.weight", "encoder_final_ln.w"),
        Row("decoder.final_layer_norm.weight", "decoder_final_ln.w"),
        *classic.head("lm_head", tree, shared),
    ]


def attention_half_rows(tree: EncoderDecoderConfig, encoder_attention: str = "SelfAttention") -> list[Row]:
    """Rows of self-attention, cross-attention, all norms of the layers, and the position biases."""
    bias, of_encoder = "relative_attention_bias.weight", f"0.{encoder_attention}."
    e, d = "encoder.block.{i}.layer.", "decoder.block.{i}.layer."
    encoder = [
        *attention_rows(e + of_encoder, "encoder.{i}.attn."),
        Row(e + "0.layer_norm.weight", "encoder.{i}.ln1.w"),
        Row(e + "1.layer_norm.weight", "encoder.{i}.ln2.w"),
        Row(e + of_encoder + bias, "encoder.{i}.attn.position_bias.W_rel"),
    ]
    decoder = [
        *attention_rows(d + "0.SelfAttention.", "decoder.{i}.attn."),
        *attention_rows(d + "1.EncDecAttention.", "decoder.{i}.cross_attn."),
        Row(d + "0.layer_norm.weight", "decoder.{i}.ln1.w"),
        Row(d + "1.layer_norm.weight", "decoder.{i}.ln2.w"),
        Row(d + "2.layer_norm.weight", "decoder.{i}.ln3.w"),
        Row(d + "0.SelfAttention." + bias, "decoder.{i}.attn.position_bias.W_rel"),
    ]
    return [
        *expand(encoder, i=len(tree.encoder.blocks)),
        *expand(decoder, i=len(tree.decoder.blocks)),
        Row("encoder.block.0.layer." + of_encoder + bias, "encoder_rel_pos_bias.W_rel"),
        Row("decoder.block.0.layer.0.SelfAttention." + bias, "decoder_rel_pos_bias.W_rel"),
    ]


def dense_rows(tree: EncoderDecoderConfig) -> list[Row]:
    """Rows of the MLPs of the encoder and the decoder."""
    cfg = tree.encoder.blocks[0].mlp
    assert isinstance(cfg, (MLP.Config, GatedMLP.Config))
    encoder = mlp_rows(cfg, "encoder.block.{i}.layer.1.DenseReluDense.", "encoder.{i}.mlp.")
    decoder = mlp_rows(cfg, "decoder.block.{i}.layer.2.DenseReluDense.", "decoder.{i}.mlp.")
    return [*expand(encoder, i=len(tree.encoder.blocks)), *expand(decoder, i=len(tree.decoder.blocks))]


def rows(tree: EncoderDecoderConfig, encoder_attention: str = "SelfAttention") -> list[Row]:
    """Rows of every weight that such a model can have; rows of weights that a model lacks are skipped when loading.

    `encoder_attention` is the name of the encoder's attention.
    """
    return [*outer_rows(tree), *attention_half_rows(tree, encoder_attention), *dense_rows(tree)]
