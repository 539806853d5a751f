"""BigBird-PEGASUS (Zaheer et al. 2020, arXiv:2007.14062): PEGASUS with learned positions, and block-sparse attention to long
texts."""

from dataclasses import replace
from typing import Any

from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.families._shared import bart_like, bert_like
from hooked_lm.families._shared.bart_like import IGNORED, NO_EFFECT, PREFIX, adjusted_to_tensors
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderDecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]


def config(hf: HFConfig) -> EncoderDecoderConfig:
    pos_embed = PosEmbed.Config(hf.max_position_embeddings, hf.d_model)
    tree = bart_like.encoder_decoder(hf, pos_embed, pre_norm=True, attn_bias=hf.use_bias)
    block: Any = tree.encoder.blocks[0]
    sparse = replace(block, attn=replace(block.attn, position_bias=bert_like.block_sparse(hf)))
    blocks = (sparse,) * len(tree.encoder.blocks)
    return replace(tree, encoder=replace(tree.encoder, blocks=blocks))


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    return bart_like.nested_rows(tree, "self", {"": ""}, final_norm="layernorm_embedding")
