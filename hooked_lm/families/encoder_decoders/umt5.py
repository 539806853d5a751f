"""umT5 (Chung et al. 2023, arXiv:2304.09151): T5 in many languages, with a separate position bias in each layer."""

from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.t5_like import (
    IGNORED,
    NO_EFFECT,
    PREFIX,
    adjusted_to_tensors,
    encoder_decoder,
    mlp,
    rows,
)
from hooked_lm.models.config.tree import EncoderDecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]


def config(hf: HFConfig) -> EncoderDecoderConfig:
    is_scaled = hf.get("scale_decoder_outputs", True)  # always, before transformers 5.24
    return encoder_decoder(hf, mlp(hf), scale=hf.d_model**-0.5 if is_scaled else 1.0, shared_bias=False)
