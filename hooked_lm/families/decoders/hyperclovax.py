"""HyperCLOVA X SEED Think (NAVER Cloud 2025, arXiv:2506.22403): Granite's multipliers, but one that multiplies logits, and norms
after each sublayer, too."""

from dataclasses import replace

from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import granite
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    tree, norm = granite.config(hf), llama_like.rms_norm(hf) if hf.use_post_norm else None
    blocks = tuple(replace(block, ln1_post=norm, ln2_post=norm) for block in tree.blocks)
    return replace(tree, blocks=blocks, unembed=replace(tree.unembed, scale=float(hf.logits_scaling)))


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.rows(tree),
        *classic.norm("model.layers.{l}.post_norm1", "blocks.{l}.ln1_post"),
        *classic.norm("model.layers.{l}.post_norm2", "blocks.{l}.ln2_post"),
    ]
