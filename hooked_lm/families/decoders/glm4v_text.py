"""The language model of GLM-4.1V (GLM-V Team 2025, arXiv:2507.01006): GLM-4 with rotary positions on three axes."""

from hooked_lm.families._shared import mrope
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import glm4
from hooked_lm.families.decoders.glm4 import rows
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = glm4.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    hf.require(head_dim=hf.hidden_size // hf.num_attention_heads)  # only the rotary embedding of transformers reads it
    return glm4.config(mrope.on_text(hf, attention_bias=True, head_dim=None))
