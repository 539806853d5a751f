"""LED (Beltagy et al. 2020, arXiv:2004.05150): BART whose encoder attends within windows, apart
from tokens of global attention, by default none. Published summaries give it to the first token (`global_attention_mask`)."""

from dataclasses import replace

from hooked_lm.components.attention.global_tokens import GlobalTokens, WindowAttention
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.families._shared import bart_like, bert_like
from hooked_lm.families._shared.bart_like import IGNORED, adjusted_to_tensors
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderDecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]

PREFIX = "led."
NO_EFFECT = (*bart_like.NO_EFFECT, "max_position_embeddings")


def config(hf: HFConfig) -> EncoderDecoderConfig:
    n_source, n_target = hf.max_encoder_position_embeddings, hf.max_decoder_position_embeddings
    with_names_of_bart = hf.changed(max_position_embeddings=max(n_source, n_target), scale_embedding=False)
    tree = bart_like.encoder_decoder(with_names_of_bart, PosEmbed.Config(n_source, hf.d_model), False, embed_norm=True)
    windows = bert_like.windows_on_both_sides(hf, len(tree.encoder.blocks))
    blocks = tuple(
        replace(block, attn=WindowAttention.Config(**(vars(block.attn) | {"window": window})))
        for block, window in zip(tree.encoder.blocks, windows, strict=True)
    )
    of_target = PosEmbed.Config(n_target, hf.d_model)
    return replace(
        tree,
        encoder=replace(tree.encoder, blocks=blocks, n_ctx=n_source),
        decoder=replace(tree.decoder, pos_embed=of_target, n_ctx=n_target),
        global_tokens=GlobalTokens.Config(),
    )


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    return bart_like.nested_rows(tree, "longformer_self_attn", {"": "", "_global": "_global"}, PREFIX)
