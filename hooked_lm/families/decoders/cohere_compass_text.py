"""North Micro Vision's text model (Cohere 2026, huggingface.co/CohereLabs/North-Micro-Vision-Instruct): Command R7B with rotary
pairs across the halves of a head, and rotary parameters, or none, for each layer type."""

from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.families.decoders import cohere
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# of the retrieval head; of the pattern, which `layer_types` give
NO_EFFECT = (*cohere.NO_EFFECT, "pooling", "sliding_window_pattern")


def config(hf: HFConfig) -> DecoderConfig:
    blocks = [
        cohere.block(hf, rotary=_rotary(hf, layer_type), window=window)
        for layer_type, window in zip(hf.layer_types, llama_like.windows(hf), strict=False)
    ]
    return llama_like.around(hf, blocks, blocks[0].ln1, logit_scale=hf.logit_scale or 1.0)


def _rotary(hf: HFConfig, layer_type: str) -> Rotary | None:
    """The rotary embedding of a layer type, None if its parameters are."""
    given = hf.rope_parameters
    has_none = not given or given.get(layer_type, given) is None
    return None if has_none else rotary(hf, hf.head_dim, layer_type)
