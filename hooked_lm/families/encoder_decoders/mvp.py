"""MVP (Tang et al. 2022, arXiv:2206.12131): BART, trained on many tasks of text generation."""

from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoder_decoders import bart
from hooked_lm.families.encoder_decoders.bart import IGNORED, PREFIX, adjusted_to_tensors, rows
from hooked_lm.models.config.tree import EncoderDecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]

NO_EFFECT = (*bart.NO_EFFECT, "prompt_length", "prompt_mid_dim")


def config(hf: HFConfig) -> EncoderDecoderConfig:
    if hf.use_prompt:
        raise ValueError("use_prompt=True: learned keys and values in front of those of the tokens are not supported")
    return bart.config(hf)
