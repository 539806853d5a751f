"""M2M-100 (Fan et al. 2020, arXiv:2010.11125) and NLLB-200 (arXiv:2207.04672): norms before sublayers, sinusoidal positions."""

from hooked_lm.components.embeddings.pos_embed import FairseqSinusoidalEmbed
from hooked_lm.families._shared.bart_like import IGNORED, NO_EFFECT, PREFIX, encoder_decoder, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderDecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> EncoderDecoderConfig:
    pos_embed = FairseqSinusoidalEmbed.Config(hf.d_model, offset=hf.pad_token_id + 1)
    return encoder_decoder(hf, pos_embed, pre_norm=True, logits_bias=False)
