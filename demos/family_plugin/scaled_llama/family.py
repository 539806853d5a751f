"""The family: how the config becomes a tree of components, and which tensor fills which parameter."""

from dataclasses import replace

import scaled_llama.model  # noqa: F401 (registers the config and the model with transformers)
from hooked_lm.families import family
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

LLAMA = family("llama")
PREFIX, IGNORED, rows = LLAMA.PREFIX, LLAMA.IGNORED, LLAMA.rows


def config(hf: HFConfig) -> DecoderConfig:
    tree = LLAMA.config(hf)
    return replace(tree, embed=replace(tree.embed, scale=hf.embedding_scale))
