"""Marian's translation models (Junczys-Dowmunt et al. 2018, arXiv:1804.00344): post-norm blocks, sinusoidal positions."""

from hooked_lm.components.embeddings.pos_embed import SinusoidalEmbed
from hooked_lm.families._shared import bart_like
from hooked_lm.families._shared.bart_like import NO_EFFECT, PREFIX, adjusted_to_tensors, encoder_decoder, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderDecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]

IGNORED = (*bart_like.IGNORED, "*.embed_positions.weight")  # old files contain the sinusoidal table


def config(hf: HFConfig) -> EncoderDecoderConfig:
    d_target_vocab = None if hf.share_encoder_decoder_embeddings else hf.decoder_vocab_size
    if d_target_vocab is None and hf.decoder_vocab_size != hf.vocab_size:
        raise ValueError(f"shared embeddings of {hf.vocab_size} and {hf.decoder_vocab_size} tokens cannot be one")
    return encoder_decoder(hf, SinusoidalEmbed.Config(hf.d_model), pre_norm=False, d_target_vocab=d_target_vocab)
