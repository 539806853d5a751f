"""LFM3 (Liquid AI 2026): LFM2 with windows in some attention layers, a gate per head, and norms after the sublayers."""

from dataclasses import replace

from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.families.decoders import lfm2
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

NO_EFFECT = ()
RENAMED = {r"\.g_proj\.": ".gate_proj."}  # transformers' name of the module


def config(hf: HFConfig) -> DecoderConfig:
    norm, mlp = (
        RMSNorm.Config(hf.hidden_size, hf.norm_eps),
        GatedMLP.Config(hf.hidden_size, hf.intermediate_size, "silu"),
    )
    attns = {kind: _attention(hf, kind) for kind in ("full_attention", "sliding_attention") if kind in hf.layer_types}
    blocks = lfm2.blocks(hf, [mlp] * hf.num_hidden_layers, attns)
    if hf.use_sandwich_norm:
        blocks = [replace(block, ln1_post=norm, ln2_post=norm) for block in blocks]
    return llama_like.around(hf, blocks, norm)


def _attention(hf: HFConfig, kind: str) -> Attention.Config:
    """The attention of layers of this type."""
    attn = llama_like.attention(
        hf,
        rotary=rotary(hf, hf.head_dim, kind),
        window=hf.sliding_window if kind == "sliding_attention" else None,
        qk_norm=RMSNorm.Config(hf.head_dim, hf.norm_eps),
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
    )
    return GatedAttention.Config(**vars(attn), gate_per_head=True, gate_bias=False) if hf.use_attention_gate else attn


def rows(tree: DecoderConfig) -> list[Row]:
    layer = "model.layers.{l}."
    renamed = ("self_attn.out_proj", "self_attn.q_layernorm", "self_attn.k_layernorm")
    return [
        *(row for row in lfm2.rows(tree) if not any(name in row.source for name in renamed)),
        *classic.out_of_attention(layer + "self_attn.o_proj"),
        *classic.heads_in(layer + "self_attn.gate_proj", "gate"),
        Row(layer + "self_attn.q_norm.weight", "blocks.{l}.attn.q_norm.w"),
        Row(layer + "self_attn.k_norm.weight", "blocks.{l}.attn.k_norm.w"),
        Row(layer + "post_operator_norm.weight", "blocks.{l}.ln1_post.w"),
        Row(layer + "post_ffn_norm.weight", "blocks.{l}.ln2_post.w"),
    ]
