"""VaultGemma (VaultGemma Team 2025, arXiv:2510.15001): Gemma 2 without the norms after the sublayers."""

from dataclasses import replace

from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import gemma2
from hooked_lm.families.decoders.gemma2 import NO_EFFECT, rows
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    tree = gemma2.config(hf)
    return replace(tree, blocks=tuple(replace(block, ln1_post=None, ln2_post=None) for block in tree.blocks))
