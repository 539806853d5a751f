"""LFM2 (Liquid AI 2025, arXiv:2511.23404): gated short convolutions, with attention in some layers."""

from collections.abc import Mapping, Sequence

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.lfm2 import identities as identities
from hooked_lm.families.decoders.lfm2.short_conv import ShortConv
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "blocks", "config", "rows"]

# `layer_types` has the layers with attention; the others are initialisation, and duplicate fields of the first checkpoints
NO_EFFECT = (
    *("full_attn_idxs", "block_dim", "block_*_init*", "block_norm_eps", "block_use_swiglu", "conv_dim*", "num_heads"),
    *("conv_use_xavier_init", "use_pos_enc", "theta"),
)


def config(hf: HFConfig) -> DecoderConfig:
    mlp = GatedMLP.Config(hf.hidden_size, _d_mlp(hf), "silu")
    return llama_like.around(hf, blocks(hf, [mlp] * hf.num_hidden_layers), RMSNorm.Config(hf.hidden_size, hf.norm_eps))


def blocks(
    hf: HFConfig,
    mlps: Sequence[GatedMLP.Config | MoE.Config],
    attns: Mapping[str, Attention.Config] | None = None,
) -> list[PreNormBlock.Config | MixerMLPBlock.Config]:
    """The layers with these MLPs: a short convolution, or the attention of the layer's type; by default LFM2's.

    Raises ValueError for other `layer_types`, and without them: then transformers builds no LFM2 MoE.
    """
    norm = RMSNorm.Config(hf.hidden_size, hf.norm_eps)
    attns = {"full_attention": attention(hf)} if attns is None else attns
    kinds = hf.layer_types
    if kinds is None:
        raise ValueError(f"layer_types is missing: it lists the type of each layer, {', '.join(attns)} or conv")
    if unknown := set(kinds) - {"conv", *attns}:
        raise ValueError(f"layer_types {sorted(unknown)} are not supported; {', '.join(attns)} and conv are")
    mixer = ShortConv.Config(hf.hidden_size, hf.conv_L_cache, hf.conv_bias)
    return [
        MixerMLPBlock.Config(mixer=mixer, ln1=norm, mlp=mlp, ln2=norm)
        if kind == "conv"
        else PreNormBlock.Config(attn=attns[kind], ln1=norm, mlp=mlp, ln2=norm)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]


def attention(hf: HFConfig) -> Attention.Config:
    """The attention of a layer."""
    return llama_like.attention(hf, qk_norm=RMSNorm.Config(llama_like.head_dim(hf), hf.norm_eps))


def _d_mlp(hf: HFConfig) -> int:
    """The width of the MLP: two thirds of `intermediate_size`, times a factor, rounded up to a multiple."""
    size, factor, multiple = int(2 * hf.intermediate_size / 3), hf.block_ffn_dim_multiplier, hf.block_multiple_of
    if not hf.block_auto_adjust_ff_dim:
        return hf.intermediate_size
    return size if factor is None else -(-int(factor * size) // multiple) * multiple


def rows(tree: DecoderConfig) -> list[Row]:
    layer, mixer = "model.layers.{l}.", "blocks.{l}.mixer."
    source, parts = layer + "conv.", ["B", "gate", "x"]
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        Row(layer + "operator_norm.weight", "blocks.{l}.ln1.w"),
        *classic.attention(layer + "self_attn.", out="out_proj"),
        Row(layer + "self_attn.q_layernorm.weight", "blocks.{l}.attn.q_norm.w"),
        Row(layer + "self_attn.k_layernorm.weight", "blocks.{l}.attn.k_norm.w"),
        Row(source + "in_proj.weight", mixer + "W_{x}", "(x i) m -> m i", x=parts),
        Row(source + "in_proj.bias", mixer + "b_{x}", "(x i) -> i", x=parts),
        Row(source + "conv.weight", mixer + "conv.W_conv", "i 1 k -> k i"),
        Row(source + "conv.bias", mixer + "conv.b_conv"),
        *classic.linear(source + "out_proj", mixer, "out"),
        Row(layer + "ffn_norm.weight", "blocks.{l}.ln2.w"),
        *classic.linear(layer + "feed_forward.w1", classic.MLP, "gate"),
        *classic.linear(layer + "feed_forward.w3", classic.MLP, "in"),
        *classic.linear(layer + "feed_forward.w2", classic.MLP, "out"),
        Row("model.embedding_norm.weight", "ln_final.w"),
        *classic.head("lm_head", tree, "model.embed_tokens.weight"),
    ]
