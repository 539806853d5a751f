"""T5Gemma 2 (Zhang et al. 2025, arXiv:2512.14856): a bidirectional Gemma 3 as encoder, and one as decoder whose attention to its
own keys and to the encoder's is one. Without the tower of images, whose end-of-image token has a vector of its own."""

from dataclasses import replace
from typing import Any

from hooked_lm.components.attention.position_bias import Band
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.families._shared import classic, seq2seq
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import gemma3_text
from hooked_lm.families.encoder_decoders.t5gemma import IGNORED, PREFIX, layer_rows
from hooked_lm.families.encoder_decoders.t5gemma2 import identities as identities
from hooked_lm.families.encoder_decoders.t5gemma2.merged import MergedAttention, MergedBlock
from hooked_lm.families.encoder_decoders.t5gemma2.replaced_embed import ReplacedEmbed
from hooked_lm.models.config.tree import EncoderDecoderConfig, StackConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows", "text_names"]

NO_EFFECT = (
    *gemma3_text.NO_EFFECT,
    *seq2seq.GENERATION,
    *("vision_config", "mm_tokens_per_image", "boi_token_index", "image_token_index"),  # of images
    *("vocab_size", "tie_word_embeddings"),  # of the whole, of the parts
)


def config(hf: HFConfig) -> EncoderDecoderConfig:
    eoi = hf.part("encoder").eoi_token_index
    hf.require(is_encoder_decoder=True, eoi_token_index=eoi)
    parts = hf.part("encoder").part("text_config"), hf.part("decoder")
    for part in parts:
        part.ignored_by_transformers(use_bidirectional_attention=False)  # but for the window that it saves
    encoder, decoder = (gemma3_text.config(part.changed(use_bidirectional_attention=False)) for part in parts)
    embed = ReplacedEmbed.Config(**vars(decoder.embed), replaced=eoi)
    return EncoderDecoderConfig(
        n_ctx=min(encoder.n_ctx, decoder.n_ctx),
        embed=embed,
        encoder=StackConfig(tuple(seeing_both_sides(block) for block in encoder.blocks), ln_final=encoder.ln_final),
        decoder=StackConfig(tuple(merged(block) for block in decoder.blocks), ln_final=decoder.ln_final),
        unembed=replace(decoder.unembed, tied=hf.tie_word_embeddings),
        decoder_embed=None if hf.tie_word_embeddings else embed,
    )


def seeing_both_sides(block: PreNormBlock.Config) -> PreNormBlock.Config:
    """The block of an encoder. Its `sliding_window` is the number of keys; of an even number one more is after the query."""
    attn: Any = block.attn
    band = None if attn.window is None else Band(before=(attn.window - 1) // 2, after=attn.window // 2)
    return replace(block, attn=replace(attn, causal=False, window=None, position_bias=band))


def merged(block: PreNormBlock.Config) -> MergedBlock.Config:
    """The block with one attention to own keys and those of the encoder."""
    return MergedBlock.Config(**{**vars(block), "attn": MergedAttention.Config(**vars(block.attn))})


def text_names(_: HFConfig) -> dict[str, str | None]:
    """The tower of images, and what makes its output as wide as the stream."""
    return {r"\bencoder\.(vision_tower|multi_modal_projector)\b": None}


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    source, norms = "model.{}.embed_tokens.{}", {"self_attn": "ln1", "feedforward": "ln2"}
    vectors = {"weight": "W_E", "eoi_embedding": "w_replaced"}
    tied_to = {name: source.format("encoder", name) if tree.decoder_embed is None else None for name in vectors}
    return [
        *(Row(source.format("encoder", name), f"embed.{ours}") for name, ours in vectors.items()),
        *(
            Row(source.format("decoder", name), f"decoder_embed.{ours}", tied=tied_to[name])
            for name, ours in vectors.items()
        ),
        *(Row(f"model.{side}.norm.weight", f"{side}_final_ln.w") for side in ("encoder", "decoder")),
        *classic.head("lm_head.out_proj", tree, source.format("encoder", "weight")),
        *layer_rows("encoder", norms, len(tree.encoder.blocks)),
        *layer_rows("decoder", norms, len(tree.decoder.blocks)),
    ]
