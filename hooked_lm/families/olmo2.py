"""OLMo 2 (OLMo Team 2024, arXiv:2501.00656): norms behind the sublayers, queries and keys normalised."""

from hooked_lm.families import _llama_like as llama_like
from hooked_lm.families import _olmo2 as olmo2
from hooked_lm.families._llama_like import IGNORED, PREFIX
from hooked_lm.families._olmo2 import rows
from hooked_lm.families._reader import HFConfig
from hooked_lm.models.config import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    block = olmo2.block(hf, olmo2.attention(hf))
    return llama_like.around(hf, [block] * hf.num_hidden_layers, llama_like.rms_norm(hf))
