"""The language model of Cosmos 3 Edge (NVIDIA 2026): LLaMA with a squared ReLU instead of a gate, and rotary positions on three
axes."""

from hooked_lm.families._shared import cosmos3, mrope
from hooked_lm.families._shared.cosmos3 import text_names
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import arcee
from hooked_lm.families.decoders.nemotron import rows
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "RENAMED", "config", "rows", "text_names"]

RENAMED = {**cosmos3.RENAMED, r"\.mlp\.fc1\.": ".mlp.up_proj.", r"\.mlp\.fc2\.": ".mlp.down_proj."}


def config(hf: HFConfig) -> DecoderConfig:
    return arcee.config(mrope.on_text(hf))
