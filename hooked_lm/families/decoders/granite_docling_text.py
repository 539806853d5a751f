"""The language model of Granite-Docling (IBM 2025, huggingface.co/ibm-granite/granite-docling-258M): Granite.
Image features are also added to the stream after some layers, which does nothing on text alone."""

from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import granite
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]

PREPENDS_BOS = False


def config(hf: HFConfig) -> DecoderConfig:
    return granite.config(hf)
