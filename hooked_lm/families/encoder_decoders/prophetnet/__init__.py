"""ProphetNet (Qi et al. 2020, arXiv:2001.04063): a BERT-like encoder, and a decoder with streams that predict the next token from
fewer and fewer tokens before it; the logits are those of the first of these streams."""

from dataclasses import replace

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic, seq2seq
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoder_decoders.prophetnet import identities as identities
from hooked_lm.families.encoder_decoders.prophetnet.attention import MainAttention, MainCrossAttention
from hooked_lm.families.encoder_decoders.prophetnet.block import NgramBlock, NgramEmbed
from hooked_lm.models.config.tree import EncoderDecoderConfig, StackConfig
from hooked_lm.weights import Row, expand

PREFIX = "prophetnet."
IGNORED = ()
NO_EFFECT = (*seq2seq.GENERATION, "init_std", "disable_ngram_loss", "eps")  # of training: `eps` smooths labels


def config(hf: HFConfig) -> EncoderDecoderConfig:
    hf.require(is_encoder_decoder=True, add_cross_attention=True)
    d_model, n_heads, n_predicting = hf.hidden_size, hf.num_decoder_attention_heads, hf.ngram
    norm, tied = LayerNorm.Config(d_model), hf.tie_word_embeddings
    offset = 1 + hf.pad_token_id  # positions of padding have the row of its id
    positions = PosEmbed.Config(hf.max_position_embeddings - offset, d_model, offset)
    n_encoder_heads = hf.num_encoder_attention_heads
    encoder = PostNormBlock.Config(
        attn=Attention.Config(
            d_model, n_encoder_heads, d_model // n_encoder_heads, qkv_bias=True, out_bias=True, causal=False
        ),
        ln1=norm,
        mlp=MLP.Config(d_model, hf.encoder_ffn_dim, hf.activation_function),
        ln2=norm,
    )
    buckets = RelativeBias.Config(n_heads, hf.num_buckets, hf.relative_max_distance, bidirectional=False)
    block = NgramBlock.Config(
        attn=MainAttention.Config(d_model, n_heads, d_model // n_heads, buckets),
        ln1=norm,
        cross_attn=MainCrossAttention.Config(d_model, n_heads, d_model // n_heads, qkv_bias=True, out_bias=True),
        ln2=norm,
        mlp=MLP.Config(d_model, hf.decoder_ffn_dim, hf.activation_function),
        ln3=norm,
        n_predicting=n_predicting,
    )
    decoder = [block] * (hf.num_decoder_layers - 1) + [replace(block, last=True)]
    embed = Embed.Config(hf.vocab_size, d_model)
    return EncoderDecoderConfig(
        n_ctx=positions.n_ctx,
        embed=embed,
        encoder=StackConfig((encoder,) * hf.num_encoder_layers, pos_embed=positions, ln_embed=norm),
        # predicting streams have the next position
        decoder=StackConfig(tuple(decoder), pos_embed=positions, ln_embed=norm, n_ctx=positions.n_ctx - 1),
        unembed=Unembed.Config(d_model, hf.vocab_size, tied=tied),
        decoder_embed=None if tied else embed,
        spare_embed=None if tied else embed,
        ngram_embed=NgramEmbed.Config(d_model, n_predicting),
    )


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    shared, embedding = "prophetnet.word_embeddings.weight", "prophetnet.{}.word_embeddings.weight"
    if tree.decoder_embed is None:
        embeds = [Row(shared, "embed.W_E")]
        embeds += [Row(embedding.format(side), f"{side}.embed.W_E", tied=shared) for side in ("encoder", "decoder")]
    else:
        embeds = [Row(shared, "spare_embed.W_E"), Row(embedding.format("encoder"), "embed.W_E")]
        embeds += [Row(embedding.format("decoder"), "decoder_embed.W_E")]
    return [
        *embeds,
        *classic.positions("prophetnet.encoder.position_embeddings.weight", "pos_embed", tree.encoder.pos_embed),
        *classic.positions(
            "prophetnet.decoder.position_embeddings.weight", "decoder_pos_embed", tree.decoder.pos_embed
        ),
        Row("prophetnet.decoder.ngram_embeddings.weight", "ngram_embed.W_ngram"),
        *classic.norm("prophetnet.encoder.embeddings_layer_norm", "encoder_embed_ln"),
        *classic.norm("prophetnet.decoder.embeddings_layer_norm", "decoder_embed_ln"),
        *layer_rows("encoder", len(tree.encoder.blocks)),
        *layer_rows("decoder", len(tree.decoder.blocks)),
        classic.head("lm_head", tree, shared)[0],
    ]


def layer_rows(side: str, n_layers: int) -> list[Row]:
    """Rows of the layers of either side."""
    source, target = f"prophetnet.{side}.layers.{{i}}.", f"{side}.{{i}}."
    norms = {"self_attn": "ln1", "feed_forward": "ln2"} if side == "encoder" else DECODER_NORMS
    found = [row for x, ln in norms.items() for row in classic.norm(f"{source}{x}_layer_norm", target + ln)]
    for part, name in {"self_attn": "attn", "cross_attn": "cross_attn"}.items():
        q, k, v = (f"{source}{part}.{x}_proj" for x in ("query", "key", "value"))
        found += classic.into_attention(q, k, v, f"{target}{name}.")
        found += classic.out_of_attention(f"{source}{part}.out_proj", f"{target}{name}.")
    found += classic.into_mlp(source + "feed_forward.intermediate", target + "mlp.")
    found += classic.out_of_mlp(source + "feed_forward.output", target + "mlp.")
    found += [
        Row(source + "self_attn.relative_pos_embeddings.weight", target + "attn.W_rel", "(b n) m -> n m b"),
        Row(source + "self_attn.relative_pos_embeddings.bias", target + "attn.b_rel", "(b n) -> n b"),
    ]
    return expand(found, i=n_layers)


DECODER_NORMS = {"self_attn": "ln1", "cross_attn": "ln2", "feed_forward": "ln3"}
