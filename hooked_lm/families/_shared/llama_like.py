"""Shared code for LLaMA-like models: RMS norms before rotary attention and a gated MLP, and the tensor names."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import NormConfig, RMSNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "model."
IGNORED = ("*.rotary_emb.inv_freq",)


def head_dim(hf: HFConfig) -> int:
    """The width of a head: `head_dim`, or by default an equal part of the stream's."""
    return hf.get("head_dim") or hf.hidden_size // hf.num_attention_heads


def attention(hf: HFConfig, partial: bool = False, **options: Any) -> Attention.Config:
    """The attention of a layer, from the usual config fields.

    `partial` allows architectures to rotate only part of a head. `options` are further arguments of `Attention.Config`; a
    `rotary` among them replaces that of the config.
    """
    d_head = head_dim(hf)
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
    """The sliding window of each layer, None for full attention. Raises ValueError for other `layer_types`."""
    meanings = {"full_attention": None, "sliding_attention": hf.sliding_window}
    if unknown := set(hf.layer_types) - set(meanings):
        raise ValueError(f"layer_types {sorted(unknown)} are not supported; {' and '.join(meanings)} are")
    return [meanings[layer_type] for layer_type in hf.layer_types[: hf.num_hidden_layers]]


def by_window(hf: HFConfig, attn: Attention.Config) -> list[Attention.Config]:
    """The attention of each layer: `attn` with the window of the layer's type."""
    return [replace(attn, window=window) for window in windows(hf)]


def rotary_in_windows(hf: HFConfig, attn: Attention.Config) -> list[Attention.Config]:
    """The same, with rotary in local layers only; without a `sliding_window`, in all layers."""
    is_hybrid = hf.sliding_window is not None
    attns = by_window(hf, attn)
    return [replace(each, rotary=None) if is_hybrid and each.window is None else each for each in attns]


def head_norm(hf: HFConfig) -> RMSNorm.Config:
    """A norm of each head's query or key."""
    return RMSNorm.Config(head_dim(hf), hf.rms_norm_eps)


def rms_norm(hf: HFConfig) -> RMSNorm.Config:
    """A norm of the residual stream."""
    return RMSNorm.Config(hf.hidden_size, hf.rms_norm_eps)


def gated_mlp(hf: HFConfig, bias: bool = False) -> GatedMLP.Config:
    """The MLP of a layer."""
    return GatedMLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act, bias)


def decoder(
    hf: HFConfig, attn: Attention.Config, windows: Sequence[int | None] | None = None, mlp_bias: bool = False
) -> DecoderConfig:
    """The decoder with this attention in all layers; `windows` gives each layer's sliding window."""
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
    """The decoder with these blocks; `scale` multiplies the embedding, `unembed` are options of the unembedding."""
    return DecoderConfig(
        n_ctx=n_ctx(hf),
        embed=Embed.Config(hf.vocab_size, hf.hidden_size, scale),
        blocks=tuple(blocks),
        ln_final=ln_final,
        unembed=Unembed.Config(
            hf.hidden_size, hf.vocab_size, scale=logit_scale, tied=hf.tie_word_embeddings, **unembed
        ),
    )


def outer_rows(tree: DecoderConfig, embed: str = "model.embed_tokens") -> list[Row]:
    """Rows of the embedding, the final norm and the unembedding."""
    return [
        Row(embed + ".weight", "embed.W_E"),
        *classic.norm("model.norm", "ln_final"),
        *classic.head("lm_head", tree, embed + ".weight"),
    ]


def norm_rows() -> list[Row]:
    """Rows of a block's two norms, before attention and before the MLP."""
    return [
        *classic.norm("model.layers.{l}.input_layernorm", "blocks.{l}.ln1"),
        *classic.norm("model.layers.{l}.post_attention_layernorm", "blocks.{l}.ln2"),
    ]


def post_norm_rows() -> list[Row]:
    """Rows of a block's norms after attention and after the MLP."""
    return [
        Row("model.layers.{l}.post_attention_layernorm.weight", "blocks.{l}.ln1_post.w"),
        Row("model.layers.{l}.post_feedforward_layernorm.weight", "blocks.{l}.ln2_post.w"),
    ]


def four_norm_rows() -> list[Row]:
    """Rows of a block's four norms, before and after each sublayer."""
    return [
        Row("model.layers.{l}.input_layernorm.weight", "blocks.{l}.ln1.w"),
        Row("model.layers.{l}.pre_feedforward_layernorm.weight", "blocks.{l}.ln2.w"),
        *post_norm_rows(),
    ]


def attention_rows() -> list[Row]:
    """Rows of the attention's projections, biases, query and key norms, and sinks."""
    source, target = "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    return [
        *classic.attention(source),
        Row(source + "q_norm.weight", target + "q_norm.w"),
        Row(source + "k_norm.weight", target + "k_norm.w"),
        Row(source + "sinks", target + "sinks"),
    ]


def mlp_rows() -> list[Row]:
    """Rows of the MLP, with or without a gate."""
    return classic.gated_mlp("model.layers.{l}.mlp.")


def fused_mlp_rows() -> list[Row]:
    """Rows of a gated MLP whose gate and input projections are one tensor."""
    source, target = "model.layers.{l}.mlp.", "blocks.{l}.mlp."
    return [
        Row(source + "gate_up_proj.weight", target + "W_{x}", "(x f) m -> m f", x=["gate", "in"]),
        Row(source + "down_proj.weight", target + "W_out", "m f -> f m"),
    ]


def rows(tree: DecoderConfig) -> list[Row]:
    """Rows of every weight that such a decoder can have; rows of weights that a model lacks are skipped when loading."""
    return [*outer_rows(tree), *norm_rows(), *attention_rows(), *mlp_rows()]
