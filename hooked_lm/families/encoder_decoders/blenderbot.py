"""Blenderbot (Roller et al. 2020, arXiv:2004.13637): norms before sublayers, learned positions."""

from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.families._shared.bart_like import IGNORED, NO_EFFECT, PREFIX, adjusted_to_tensors, encoder_decoder, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderDecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]


def config(hf: HFConfig) -> EncoderDecoderConfig:
    pos_embed = PosEmbed.Config(hf.max_position_embeddings, hf.d_model)
    return encoder_decoder(hf, pos_embed, pre_norm=True)
