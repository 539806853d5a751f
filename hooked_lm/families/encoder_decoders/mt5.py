"""mT5 (Xue et al. 2020, arXiv:2010.11934): T5 in many languages, with an unembedding that is not scaled."""

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
    return encoder_decoder(hf, mlp(hf), scale=1.0)
