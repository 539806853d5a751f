"""The language model of Qwen3-Omni (Qwen Team 2025, arXiv:2509.17765), its thinker: Qwen3-MoE with interleaved rotary
positions on three axes, and without windows: the model of transformers does not read `sliding_window`."""

from hooked_lm.families._shared import mrope
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.moe import rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import qwen3_moe
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = qwen3_moe.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    return qwen3_moe.config(mrope.on_text(hf, num_local_experts=hf.num_experts, sliding_window=None))
