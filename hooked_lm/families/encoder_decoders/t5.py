"""T5 (Raffel et al. 2019, arXiv:1910.10683), including T5 1.1 and Flan-T5."""

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
    return encoder_decoder(hf, mlp(hf), scale=hf.d_model**-0.5 if hf.scale_decoder_outputs else 1.0)
