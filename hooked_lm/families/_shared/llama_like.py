"""What the descendants of LLaMA share: RMS norms before rotary attention and a gated MLP, and the names on disk."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embed import Embed, Unembed
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norm import NormConfig, RMSNorm
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "model."
IGNORED = ("*.rotary_emb.inv_freq",)


def attention(hf: HFConfig, partial: bool = False, **options: Any) -> Attention.Config:
    """The attention of a layer, as most of these configs write it; `options` go before what is read from there.

    `partial` architectures can turn part of a head only.
    """
    d_head = hf.get("head_dim") or hf.hidden_size // hf.num_attention_heads
    if "rotary" not in options:
        options["rotary"] = rotary(hf, d_head, partial=partial)
    return Attention.Config(
        d_model=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        d_head=d_head,
        n_key_value_heads=hf.num_key_value_heads,
        **options,
    )


def windows(hf: HFConfig) -> list[int | None]:
    """The sliding window of each layer, None where a layer sees everything before it."""
    meanings = {"full_attention": None, "sliding_attention": hf.sliding_window}
    if unknown := set(hf.layer_types) - set(meanings):
        raise ValueError(f"layer_types {sorted(unknown)} are not supported; {' and '.join(meanings)} are")
    return [meanings[layer_type] for layer_type in hf.layer_types[: hf.num_hidden_layers]]


def rms_norm(hf: HFConfig) -> RMSNorm.Config:
    """The norm of the stream."""
    return RMSNorm.Config(hf.hidden_size, hf.rms_norm_eps)


def gated_mlp(hf: HFConfig, bias: bool = False) -> GatedMLP.Config:
    """The MLP of a layer."""
    return GatedMLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act, bias)


def decoder(
    hf: HFConfig, attn: Attention.Config, windows: Sequence[int | None] | None = None, mlp_bias: bool = False
) -> DecoderConfig:
    """The decoder whose layers have this attention, each with its window."""
    windows = [attn.window] * hf.num_hidden_layers if windows is None else windows
    norm = rms_norm(hf)
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=gated_mlp(hf, mlp_bias), ln2=norm)
    return around(hf, [replace(block, attn=replace(attn, window=window)) for window in windows], norm)


def around(
    hf: HFConfig,
    blocks: Iterable[Any],
    ln_final: NormConfig | None,
    scale: float = 1.0,
    logit_scale: float = 1.0,
    **unembed: Any,
) -> DecoderConfig:
    """The decoder of these blocks; `scale` is that of the embedding, `unembed` are options of the unembedding."""
    return DecoderConfig(
        n_ctx=n_ctx(hf),
        embed=Embed.Config(hf.vocab_size, hf.hidden_size, scale),
        blocks=tuple(blocks),
        ln_final=ln_final,
        unembed=Unembed.Config(
            hf.hidden_size, hf.vocab_size, scale=logit_scale, tied=hf.tie_word_embeddings, **unembed
        ),
    )


def outer_rows(tree: DecoderConfig) -> list[Row]:
    """Embedding, final norm and unembedding."""
    tied = "model.embed_tokens.weight" if tree.unembed.tied else None
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        Row("model.norm.weight", "ln_final.w"),
        Row("model.norm.bias", "ln_final.b"),
        Row("lm_head.weight", "unembed.W_U", "v m -> m v", tied=tied),
        Row("lm_head.bias", "unembed.b_U"),
    ]


def norm_rows(tree: DecoderConfig) -> list[Row]:
    """The two norms of a block, before attention and before the MLP."""
    return [
        Row("model.layers.{l}.input_layernorm.weight", "blocks.{l}.ln1.w"),
        Row("model.layers.{l}.input_layernorm.bias", "blocks.{l}.ln1.b"),
        Row("model.layers.{l}.post_attention_layernorm.weight", "blocks.{l}.ln2.w"),
        Row("model.layers.{l}.post_attention_layernorm.bias", "blocks.{l}.ln2.b"),
    ]


def post_norm_rows(tree: DecoderConfig) -> list[Row]:
    """The two norms of a block that has them after attention and after the MLP."""
    return [
        Row("model.layers.{l}.post_attention_layernorm.weight", "blocks.{l}.ln1_post.w"),
        Row("model.layers.{l}.post_feedforward_layernorm.weight", "blocks.{l}.ln2_post.w"),
    ]


def four_norm_rows(tree: DecoderConfig) -> list[Row]:
    """The four norms of a block that has them before and after both sublayers."""
    return [
        Row("model.layers.{l}.input_layernorm.weight", "blocks.{l}.ln1.w"),
        Row("model.layers.{l}.pre_feedforward_layernorm.weight", "blocks.{l}.ln2.w"),
        *post_norm_rows(tree),
    ]


def attention_rows(tree: DecoderConfig) -> list[Row]:
    """Projections, biases, and the norms of queries and keys."""
    theirs, ours = "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    return [
        Row(theirs + "q_proj.weight", ours + "W_Q", "(n h) m -> n m h"),
        Row(theirs + "k_proj.weight", ours + "W_K", "(n h) m -> n m h"),
        Row(theirs + "v_proj.weight", ours + "W_V", "(n h) m -> n m h"),
        Row(theirs + "o_proj.weight", ours + "W_O", "m (n h) -> n h m"),
        Row(theirs + "q_proj.bias", ours + "b_Q", "(n h) -> n h"),
        Row(theirs + "k_proj.bias", ours + "b_K", "(n h) -> n h"),
        Row(theirs + "v_proj.bias", ours + "b_V", "(n h) -> n h"),
        Row(theirs + "o_proj.bias", ours + "b_O"),
        Row(theirs + "q_norm.weight", ours + "q_norm.w"),
        Row(theirs + "k_norm.weight", ours + "k_norm.w"),
        Row(theirs + "sinks", ours + "sinks"),
    ]


def mlp_rows(tree: DecoderConfig) -> list[Row]:
    """The gated MLP."""
    theirs, ours = "model.layers.{l}.mlp.", "blocks.{l}.mlp."
    return [
        Row(theirs + "gate_proj.weight", ours + "W_gate", "f m -> m f"),
        Row(theirs + "up_proj.weight", ours + "W_in", "f m -> m f"),
        Row(theirs + "down_proj.weight", ours + "W_out", "m f -> f m"),
        Row(theirs + "gate_proj.bias", ours + "b_gate"),
        Row(theirs + "up_proj.bias", ours + "b_in"),
        Row(theirs + "down_proj.bias", ours + "b_out"),
    ]


def plain_mlp_rows(tree: DecoderConfig) -> list[Row]:
    """An MLP without a gate, under the same names."""
    theirs, ours = "model.layers.{l}.mlp.", "blocks.{l}.mlp."
    return [
        Row(theirs + "up_proj.weight", ours + "W_in", "f m -> m f"),
        Row(theirs + "up_proj.bias", ours + "b_in"),
        Row(theirs + "down_proj.weight", ours + "W_out", "m f -> f m"),
        Row(theirs + "down_proj.bias", ours + "b_out"),
    ]


def fused_mlp_rows(tree: DecoderConfig) -> list[Row]:
    """The gated MLP with gate and other branch in one tensor."""
    theirs, ours = "model.layers.{l}.mlp.", "blocks.{l}.mlp."
    return [
        Row(theirs + "gate_up_proj.weight", ours + "W_{x}", "(x f) m -> m f", x=["gate", "in"]),
        Row(theirs + "down_proj.weight", ours + "W_out", "m f -> f m"),
    ]


def rows(tree: DecoderConfig) -> list[Row]:
    """Every weight that a decoder of this kind can have; those that a model lacks are left out when loading."""
    return [*outer_rows(tree), *norm_rows(tree), *attention_rows(tree), *mlp_rows(tree)]
