"""Shared code for OLMo 2 and its successors: norms after the sublayers, queries and keys normalised over all heads jointly."""

from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.norm import RMSNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row


def joint_norms(hf: HFConfig) -> dict[str, Any]:
    """The norms of queries and keys; all heads share one divisor."""
    d_head = hf.get("head_dim") or hf.hidden_size // hf.num_attention_heads
    heads = {"qk_norm": hf.num_attention_heads, "k_norm": hf.num_key_value_heads}
    return {name: RMSNorm.Config(d_head, hf.rms_norm_eps, n_heads=n, joint=True) for name, n in heads.items()}


def attention(hf: HFConfig, **options: Any) -> Attention.Config:
    """The attention of a layer."""
    return llama_like.attention(
        hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias, **joint_norms(hf), **options
    )


def block(hf: HFConfig, attn: Attention.Config) -> PreNormBlock.Config:
    """A layer whose sublayers have normalised outputs and unnormalised inputs."""
    norm = llama_like.rms_norm(hf)
    return PreNormBlock.Config(attn=attn, ln1_post=norm, mlp=llama_like.gated_mlp(hf), ln2_post=norm)


def rows(tree: DecoderConfig) -> list[Row]:
    """Rows of every weight of such a decoder."""
    attn = tree.blocks[0].attn
    theirs, ours = "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    return [
        *llama_like.outer_rows(tree),
        *llama_like.post_norm_rows(tree),
        *(row for row in llama_like.attention_rows(tree) if "_norm" not in row.theirs),
        Row(theirs + "q_norm.weight", ours + "q_norm.w", "(n h) -> n h", n=attn.n_heads),
        Row(theirs + "k_norm.weight", ours + "k_norm.w", "(n h) -> n h", n=attn.n_kv),
        *llama_like.mlp_rows(tree),
    ]
