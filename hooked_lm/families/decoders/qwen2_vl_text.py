"""The language model of Qwen2-VL (Wang et al. 2024, arXiv:2409.12191): Qwen2 with rotary positions on three axes."""

from hooked_lm.families._shared import mrope
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import qwen2
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = qwen2.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    return qwen2.config(mrope.on_text(hf))
