"""PEGASUS-X (Phang et al. 2022, arXiv:2208.04347): PEGASUS for long texts.

Its encoder attends within blocks, which are shifted by half a block in every second layer, and to learned global tokens, which
are a second stream through the encoder.
"""

from dataclasses import replace
from typing import Any

from hooked_lm.components.attention.position_bias import Chunks
from hooked_lm.components.embeddings.pos_embed import FairseqSinusoidalEmbed
from hooked_lm.families._shared import bart_like
from hooked_lm.families._shared.bart_like import IGNORED, NO_EFFECT, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoder_decoders.pegasus_x import identities as identities
from hooked_lm.families.encoder_decoders.pegasus_x.block_local import BlockLocalAttention
from hooked_lm.families.encoder_decoders.pegasus_x.global_stream import GlobalStreamBlock
from hooked_lm.models.config.tree import EncoderDecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> EncoderDecoderConfig:
    size, n_global = hf.block_size, hf.num_global_tokens
    if n_global < 1 or (hf.stagger_local_blocks and size % 2):
        raise ValueError(
            f"num_global_tokens={n_global}, block_size={size}: expected a global token or more, and blocks that have halves"
        )
    pos_embed = FairseqSinusoidalEmbed.Config(hf.d_model)
    tree = bart_like.encoder_decoder(hf, pos_embed, pre_norm=True, logits_bias=False, attn_bias=False)

    def block(plain: Any, layer: int) -> GlobalStreamBlock.Config:
        bias = Chunks(size, size // 2 if layer % 2 and hf.stagger_local_blocks else 0)
        attn = BlockLocalAttention.Config(**(vars(plain.attn) | {"position_bias": bias}))
        start = 0 if layer else n_global
        return GlobalStreamBlock.Config(**(vars(plain) | {"attn": attn}), ln1_global=plain.ln1, n_global=start)

    blocks = tuple(block(plain, layer) for layer, plain in enumerate(tree.encoder.blocks))
    return replace(tree, encoder=replace(tree.encoder, blocks=blocks))


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    names = {**bart_like.ENCODER_NAMES, "global_self_attn_layer_norm": "ln1_global"}
    return [
        *bart_like.outer_rows(tree),
        *bart_like.layer_rows("encoder", names, len(tree.encoder.blocks)),
        Row(PREFIX + "encoder.embed_global.weight", "encoder.0.W_global"),
        *bart_like.decoder_rows(tree),
    ]
