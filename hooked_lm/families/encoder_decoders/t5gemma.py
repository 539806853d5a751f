"""T5Gemma (Zhang et al. 2025, arXiv:2504.06225): a bidirectional Gemma 2 as encoder, one with cross attention as decoder."""

from dataclasses import replace
from typing import Any

from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.cross import PreNormCrossBlock
from hooked_lm.families._shared import classic, seq2seq
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import gemma2
from hooked_lm.models.config.tree import EncoderDecoderConfig, StackConfig
from hooked_lm.weights import Row, expand

PREFIX = "model."
IGNORED = ("*.rotary_emb.inv_freq",)
NO_EFFECT = (*gemma2.NO_EFFECT, *seq2seq.GENERATION, "vocab_size")  # of the whole; each part has its own


def config(hf: HFConfig) -> EncoderDecoderConfig:
    hf.require(is_encoder_decoder=True)
    encoder, decoder = (gemma2.config(hf.part(side)) for side in ("encoder", "decoder"))
    d_source = hf.part("decoder").cross_attention_hidden_size
    return EncoderDecoderConfig(
        n_ctx=min(encoder.n_ctx, decoder.n_ctx),
        embed=encoder.embed,
        encoder=StackConfig(tuple(seeing_both_sides(block) for block in encoder.blocks), ln_final=encoder.ln_final),
        decoder=StackConfig(
            tuple(with_cross_attention(block, d_source) for block in decoder.blocks), ln_final=decoder.ln_final
        ),
        unembed=replace(decoder.unembed, tied=hf.tie_word_embeddings),
        decoder_embed=decoder.embed,
    )


def seeing_both_sides(block: PreNormBlock.Config) -> PreNormBlock.Config:
    """The block of an encoder. Its `sliding_window` is the greatest distance that a query sees; a decoder's counts keys."""
    window = None if block.attn.window is None else block.attn.window + 1
    attn: Any = block.attn
    return replace(block, attn=replace(attn, causal=False, window=window))


def with_cross_attention(block: PreNormBlock.Config, d_source: int) -> PreNormCrossBlock.Config:
    """The block with cross attention to an encoder of this width, and a norm before and after it."""
    attn: Any = block.attn
    cross = CrossAttention.Config(
        attn.d_model,
        attn.n_heads,
        attn.d_head,
        attn.n_key_value_heads,
        scale=attn.scale,
        qkv_bias=attn.qkv_bias,
        out_bias=attn.out_bias,
        soft_cap=attn.soft_cap,
        d_source=d_source,
    )
    return PreNormCrossBlock.Config(
        attn=attn,
        ln1=block.ln1,
        ln1_post=block.ln1_post,
        cross_attn=cross,
        ln2=block.ln2,
        ln2_post=block.ln2_post,
        mlp=block.mlp,
        ln3=block.ln2,
        ln3_post=block.ln2_post,
    )


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    embedding = "model.decoder.embed_tokens.weight"
    return [
        Row("model.encoder.embed_tokens.weight", "embed.W_E"),
        Row(embedding, "decoder_embed.W_E"),
        *(Row(f"model.{side}.norm.weight", f"{side}_final_ln.w") for side in ("encoder", "decoder")),
        *classic.head("lm_head.out_proj", tree, embedding),
        *layer_rows("encoder", {"self_attn": "ln1", "feedforward": "ln2"}, len(tree.encoder.blocks)),
        *layer_rows(
            "decoder", {"self_attn": "ln1", "cross_attn": "ln2", "feedforward": "ln3"}, len(tree.decoder.blocks)
        ),
    ]


def layer_rows(side: str, norms: dict[str, str], n_layers: int) -> list[Row]:
    """Rows of the layers; `norms` maps sublayers to the norms before them."""
    source, target = f"model.{side}.layers.{{i}}.", f"{side}.{{i}}."
    found = [*classic.gated_mlp(source + "mlp.", target + "mlp.")]
    for part, norm in norms.items():
        found += classic.norm(f"{source}pre_{part}_layernorm", target + norm)
        found += classic.norm(f"{source}post_{part}_layernorm", f"{target}{norm}_post")
    for part, name in {"self_attn": "attn", "cross_attn": "cross_attn"}.items():
        found += classic.attention(f"{source}{part}.", f"{target}{name}.")
        found += [Row(f"{source}{part}.{x}_norm.weight", f"{target}{name}.{x}_norm.w") for x in "qk"]
    return expand(found, i=n_layers)
