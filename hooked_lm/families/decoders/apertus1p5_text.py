"""The language model of Apertus 1.5 (Swiss AI Initiative 2026, huggingface.co/swiss-ai/Apertus-v1.5-8B): Apertus with tokens of
images and sounds, which a shortened head does not predict."""

from dataclasses import replace

from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import apertus
from hooked_lm.families.decoders.apertus import NO_EFFECT, rows
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    tree = apertus.config(hf)
    return replace(tree, unembed=replace(tree.unembed, d_vocab=hf.output_vocab_size or hf.vocab_size))
