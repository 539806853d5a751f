"""OLMo 2 (OLMo Team 2024, arXiv:2501.00656): norms after the sublayers; queries and keys are normalised over all heads
together."""

from typing import Any

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.norm import RMSNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "block", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    return llama_like.around(hf, [block(hf)] * hf.num_hidden_layers, llama_like.rms_norm(hf))


def block(hf: HFConfig, **options: Any) -> PreNormBlock.Config:
    """A layer; `options` are those of its attention."""
    norm, d_head = llama_like.rms_norm(hf), hf.get("head_dim") or hf.hidden_size // hf.num_attention_heads
    attn = llama_like.attention(
        hf,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=RMSNorm.Config(d_head, hf.rms_norm_eps, n_heads=hf.num_attention_heads, joint=True),
        k_norm=RMSNorm.Config(d_head, hf.rms_norm_eps, n_heads=hf.num_key_value_heads, joint=True),
        **options,
    )
    return PreNormBlock.Config(attn=attn, ln1_post=norm, mlp=llama_like.gated_mlp(hf), ln2_post=norm)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    return [
        *llama_like.outer_rows(tree),
        *llama_like.post_norm_rows(tree),
        *(row for row in llama_like.attention_rows(tree) if "_norm." not in row.source),
        *(Row(f"{source}{x}_norm.weight", f"{target}{x}_norm.w", "(n h) -> n h") for x in "qk"),
        *llama_like.mlp_rows(tree),
    ]
