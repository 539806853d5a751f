"""LongT5 with local attention (Guo et al. 2021, arXiv:2112.07916): T5 whose encoder attends to nearby tokens."""

from dataclasses import replace
from typing import Any

from hooked_lm.families._shared import t5_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.t5_like import IGNORED, PREFIX, fitted
from hooked_lm.families.encoder_decoders import t5
from hooked_lm.models.config.tree import EncoderDecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "fitted", "rows"]

NO_EFFECT = (*t5_like.NO_EFFECT, "global_block_size")


def config(hf: HFConfig) -> EncoderDecoderConfig:
    if (kind := hf.encoder_attention_type) != "local":
        raise ValueError(f"encoder_attention_type={kind!r}: keys for blocks of tokens are not supported; 'local' is")
    tree = t5.config(hf)
    block: Any = tree.encoder.blocks[0]
    local = replace(block, attn=replace(block.attn, window=hf.local_radius + 1))
    return replace(tree, encoder=replace(tree.encoder, blocks=(local,) * len(tree.encoder.blocks)))


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    return t5_like.rows(tree, encoder_attention="LocalSelfAttention")
