"""PEGASUS (Zhang et al. 2019, arXiv:1912.08777): norms before sublayers, sinusoidal positions, which files may contain."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from hooked_lm.components.embeddings.pos_embed import FixedPosEmbed, SinusoidalEmbed
from hooked_lm.families._shared import bart_like
from hooked_lm.families._shared.bart_like import IGNORED, NO_EFFECT, PREFIX, encoder_decoder, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderDecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]


def config(hf: HFConfig) -> EncoderDecoderConfig:
    return encoder_decoder(hf, FixedPosEmbed.Config(hf.max_position_embeddings, hf.d_model), pre_norm=True)


def adjusted_to_tensors(tree: EncoderDecoderConfig, tensors: Mapping[str, Tensor]) -> EncoderDecoderConfig:
    tree = bart_like.adjusted_to_tensors(tree, tensors)
    if any(name.endswith("encoder.embed_positions.weight") for name in tensors):
        return tree
    sines = SinusoidalEmbed.Config(tree.embed.d_model)
    return replace(tree, encoder=replace(tree.encoder, pos_embed=sines), decoder=replace(tree.decoder, pos_embed=sines))
