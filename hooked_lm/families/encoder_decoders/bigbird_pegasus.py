"""BigBird-PEGASUS (Zaheer et al. 2020, arXiv:2007.14062): PEGASUS with learned positions and an encoder for long texts.

As transformers does, texts of up to (5 + 2 * num_random_blocks) * block_size tokens have full attention; longer ones, which
need sparse attention, are refused.
"""

from dataclasses import replace

from hooked_lm.components.pos_embed import PosEmbed
from hooked_lm.families._shared import bart_like, bert_like
from hooked_lm.families._shared.bart_like import IGNORED, PREFIX, fitted
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderDecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "fitted", "rows"]

NO_EFFECT = (*bart_like.NO_EFFECT, "block_size", "num_random_blocks")


def config(hf: HFConfig) -> EncoderDecoderConfig:
    pos_embed = PosEmbed.Config(hf.max_position_embeddings, hf.d_model)
    tree = bart_like.encoder_decoder(hf, pos_embed, pre_norm=True, attn_bias=hf.use_bias)
    return replace(tree, encoder=replace(tree.encoder, n_ctx=bert_like.longest_full_attention(hf)))


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    return bart_like.nested_rows(tree, "self", {"": ""}, final_norm="layernorm_embedding")
