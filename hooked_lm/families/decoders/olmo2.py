"""OLMo 2 (OLMo Team 2024, arXiv:2501.00656): norms after the sublayers; queries and keys are normalised over all heads
together."""

from dataclasses import replace
from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "attention", "attention_rows", "block", "config", "joint_norms", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    return llama_like.around(hf, [block(hf)] * hf.num_hidden_layers, llama_like.rms_norm(hf))


def block(hf: HFConfig, **options: Any) -> PreNormBlock.Config:
    """A layer; `options` are those of its attention."""
    norm = llama_like.rms_norm(hf)
    attn = attention(hf, **options)
    return PreNormBlock.Config(attn=attn, ln1_post=norm, mlp=llama_like.gated_mlp(hf), ln2_post=norm)


def attention(hf: HFConfig, **options: Any) -> Attention.Config:
    """The attention of a layer."""
    qk_norm, k_norm = joint_norms(hf)
    return llama_like.attention(
        hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias, qk_norm=qk_norm, k_norm=k_norm, **options
    )


def joint_norms(hf: HFConfig) -> tuple[RMSNorm.Config, RMSNorm.Config]:
    """The norms of queries and of keys: each has one divisor for all heads."""
    norm = RMSNorm.Config(llama_like.head_dim(hf), hf.rms_norm_eps, n_heads=hf.num_attention_heads, joint=True)
    return norm, replace(norm, n_heads=hf.num_key_value_heads)


def rows(tree: DecoderConfig) -> list[Row]:
    return [*llama_like.outer_rows(tree), *llama_like.post_norm_rows(), *attention_rows(), *llama_like.mlp_rows()]


def attention_rows() -> list[Row]:
    """Rows of attention whose query and key norms have a weight for each entry of each head."""
    source, target = "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    norms = [Row(f"{source}{x}_norm.weight", f"{target}{x}_norm.w", "(n h) -> n h") for x in "qk"]
    return [*classic.attention(source), *norms]
