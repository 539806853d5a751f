"""Granite 3 MoE with a shared expert (IBM 2025, huggingface.co/ibm-research/moe-7b-1b-active-shared-experts)."""

from dataclasses import replace

from hooked_lm.components.mlp import GatedMLP
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import granitemoe
from hooked_lm.families.decoders.granitemoe import NO_EFFECT
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows", "shared_rows"]


def config(hf: HFConfig) -> DecoderConfig:
    tree, width = granitemoe.config(hf), hf.shared_intermediate_size
    shared = GatedMLP.Config(hf.hidden_size, width, hf.hidden_act) if width else None
    blocks = [replace(block, mlp=replace(block.mlp, shared=shared)) for block in tree.blocks]
    return replace(tree, blocks=tuple(blocks))


def rows(tree: DecoderConfig) -> list[Row]:
    return [*granitemoe.rows(tree), *shared_rows("blocks.{l}.mlp.shared.")]


def shared_rows(target: str) -> list[Row]:
    """Rows of the shared expert."""
    source = "model.layers.{l}.shared_mlp."
    return [
        Row(source + "input_linear.weight", target + "W_{x}", "(x f) m -> m f", x=["gate", "in"]),
        Row(source + "output_linear.weight", target + "W_out", "m f -> f m"),
    ]
