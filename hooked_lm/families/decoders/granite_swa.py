"""Granite with local layers (IBM 2026): attention sinks, and a rotary base for each layer, of which 0 is no rotary."""

from dataclasses import replace

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import granite
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows", "with_local_layers"]


def config(hf: HFConfig) -> DecoderConfig:
    return with_local_layers(hf, granite.config(hf))


def with_local_layers(hf: HFConfig, tree: DecoderConfig) -> DecoderConfig:
    """The tree with sinks, and each layer's window and rotary base."""
    blocks = []
    for block, window, theta in zip(tree.blocks, llama_like.windows(hf), hf.layer_rope_theta, strict=False):
        rotary = replace(block.attn.rotary, theta=float(theta)) if theta else None
        blocks.append(replace(block, attn=replace(block.attn, window=window, rotary=rotary, sinks=True)))
    return replace(tree, blocks=tuple(blocks))
