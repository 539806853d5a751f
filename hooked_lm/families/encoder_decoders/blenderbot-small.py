"""Blenderbot's small model (Roller et al. 2020, arXiv:2004.13637): post-norm blocks; the decoder adds positions after a norm."""

from dataclasses import replace

from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared.bart_like import IGNORED, NO_EFFECT, PREFIX, adjusted_to_tensors, encoder_decoder, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderDecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]

EPS = 1e-5  # of all norms


def config(hf: HFConfig) -> EncoderDecoderConfig:
    pos_embed = PosEmbed.Config(hf.max_position_embeddings, hf.d_model)
    tree = encoder_decoder(hf, pos_embed, pre_norm=False, embed_norm=True)
    # transformers does not scale the decoder's embeddings (BlenderbotSmallDecoder.forward): with this eps it is the same
    ln_tokens = LayerNorm.Config(hf.d_model, EPS * tree.embed.scale**2)
    return replace(tree, decoder=replace(tree.decoder, ln_tokens=ln_tokens, ln_embed=None))
