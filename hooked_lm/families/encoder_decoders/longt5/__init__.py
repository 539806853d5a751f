"""LongT5 (Guo et al. 2021, arXiv:2112.07916): T5 whose encoder attends to nearby tokens, and with transient-global attention
also to sums of blocks of tokens."""

from dataclasses import replace
from typing import Any

from hooked_lm.families._shared import t5_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.t5_like import IGNORED, NO_EFFECT, PREFIX, adjusted_to_tensors
from hooked_lm.families.encoder_decoders import t5
from hooked_lm.families.encoder_decoders.longt5 import identities as identities
from hooked_lm.families.encoder_decoders.longt5.transient_global import TransientGlobalAttention, TransientGlobalBias
from hooked_lm.models.config.tree import EncoderDecoderConfig
from hooked_lm.weights import Row, expand

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]


def config(hf: HFConfig) -> EncoderDecoderConfig:
    kind, size = hf.encoder_attention_type, hf.global_block_size
    if kind not in ("local", "transient-global"):
        raise ValueError(f"encoder_attention_type={kind!r} is not supported; 'local' and 'transient-global' are")
    tree = t5.config(hf)
    block: Any = tree.encoder.blocks[0]
    attn, bias = replace(block.attn, window=hf.local_radius + 1), tree.encoder.rel_pos_bias
    if kind == "transient-global":
        attn = TransientGlobalAttention.Config(**vars(attn), global_norm=block.ln1, block_size=size)
        bias = TransientGlobalBias.Config(**vars(bias), block_size=size)
    blocks = (replace(block, attn=attn),) * len(tree.encoder.blocks)
    return replace(tree, encoder=replace(tree.encoder, blocks=blocks, rel_pos_bias=bias))


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    if not isinstance(tree.encoder.blocks[0].attn, TransientGlobalAttention.Config):
        return t5_like.rows(tree, encoder_attention="LocalSelfAttention")
    name = "TransientGlobalSelfAttention"
    attn, bias = f"encoder.block.{{i}}.layer.0.{name}.", "global_relative_attention_bias.weight"
    norms = [Row(attn + "global_input_layer_norm.weight", "encoder.{i}.attn.global_norm.w")]
    return [
        *t5_like.rows(tree, encoder_attention=name),
        *expand(norms, i=len(tree.encoder.blocks)),
        Row(attn.format(i=0) + bias, "encoder_rel_pos_bias.W_rel_global"),
    ]
