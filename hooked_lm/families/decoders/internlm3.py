"""InternLM3 (Shanghai AI Laboratory 2025, huggingface.co/internlm/internlm3-8b-instruct): LLaMA with other sizes."""

from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import llama
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    return llama.config(hf)
