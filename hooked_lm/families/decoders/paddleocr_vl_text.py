"""The language model of PaddleOCR-VL (PaddlePaddle Team 2025, arXiv:2510.14528): LLaMA with rotary positions on three
axes. Its relative ERNIE 4.5 rotates adjacent pairs, and this one does not."""

from hooked_lm.families._shared import mrope
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import llama
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]

PREPENDS_BOS = False


def config(hf: HFConfig) -> DecoderConfig:
    return llama.config(mrope.on_text(hf, attention_bias=hf.use_bias, mlp_bias=hf.use_bias))
