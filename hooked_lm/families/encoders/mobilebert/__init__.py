"""MobileBERT (Sun et al. 2020, arXiv:2004.02984): thin layers between bottlenecks, with several MLPs, norms without normalisation
and embeddings of three tokens."""

from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.embeddings.encoder_embed import TokenTypeEmbed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import NormConfig
from hooked_lm.components.norms.scales import NoNorm
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, NO_EFFECT, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders.bert import HEADS
from hooked_lm.families.encoders.mobilebert import identities as identities
from hooked_lm.families.encoders.mobilebert.narrow import Bottleneck, NarrowBlock, SeveralMLPsBlock
from hooked_lm.families.encoders.mobilebert.trigram import SplitUnembed, TrigramEmbed, TrigramEncoderEmbed
from hooked_lm.families.encoders.mobilebert.value_source import ValueSourceAttention
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "mobilebert."
NORMS = {"no_norm": NoNorm.Config, "layer_norm": LayerNorm.Config}
EPS = 1e-5  # of two norms: `MobileBertEmbeddings` and `MobileBertOutput` (modeling_mobilebert.py) do not pass layer_norm_eps on


def norm(hf: HFConfig, d: int, eps: float | None = None) -> NormConfig:
    """A norm of this width, of the kind that the config names."""
    if hf.normalization_type not in NORMS:
        raise ValueError(f"normalization_type={hf.normalization_type!r} is not one of {', '.join(NORMS)}")
    return NORMS[hf.normalization_type](d, hf.layer_norm_eps if eps is None else eps)


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    hf.require(classifier_activation=True)
    d_model, n_ctx = hf.hidden_size, hf.max_position_embeddings
    heads: dict[str, Any] = bert_like.heads(hf, HEADS, mlm=hf.hidden_act)
    if (unembed := heads.get("unembed")) is not None:
        heads["unembed"] = SplitUnembed.Config(**vars(unembed), d_embed=hf.embedding_size)
    return EncoderConfig(
        n_ctx=n_ctx,
        embed=TrigramEncoderEmbed.Config(
            embed(hf),
            PosEmbed.Config(n_ctx, d_model),
            TokenTypeEmbed.Config(hf.type_vocab_size, d_model),
            norm(hf, d_model, EPS),
        ),
        blocks=(block(hf),) * hf.num_hidden_layers,
        **heads,
    )


def embed(hf: HFConfig) -> TrigramEmbed.Config:
    """The embedding of tokens."""
    if not hf.trigram_input and hf.embedding_size == hf.hidden_size:
        raise ValueError(
            f"trigram_input=False with an embedding_size of {hf.embedding_size}, the hidden_size, is not supported: the "
            "projection of the embeddings is then not used"
        )
    return TrigramEmbed.Config(hf.vocab_size, hf.hidden_size, d_embed=hf.embedding_size, trigram=hf.trigram_input)


def block(hf: HFConfig) -> SeveralMLPsBlock.Config:
    """A layer; without bottlenecks it is as wide as the stream."""
    d_model = hf.hidden_size
    width, shared, attends_narrow = (
        hf.intra_bottleneck_size,
        hf.key_query_shared_bottleneck,
        hf.use_bottleneck_attention,
    )
    width = width if hf.use_bottleneck else d_model
    hf.require(true_hidden_size=width)
    wide = SeveralMLPsBlock.Config(
        attn=attention(hf, width),
        ln1=norm(hf, width),
        mlp=MLP.Config(width, hf.intermediate_size, hf.hidden_act),
        ln2=norm(hf, width, EPS),
        n_ffn=hf.num_feedforward_networks - 1,
        ffn_norm=norm(hf, width),
    )
    if not hf.use_bottleneck:
        return wide
    bottleneck = Bottleneck.Config(d_model, norm(hf, width))
    return NarrowBlock.Config(
        **vars(wide),
        bottleneck=bottleneck,
        qk_bottleneck=bottleneck if shared else None,
        attends_narrow=attends_narrow,
        ln3=norm(hf, d_model),
    )


def attention(hf: HFConfig, width: int) -> Attention.Config:
    """The attention of a layer of this width."""
    d_model, n_heads = hf.hidden_size, hf.num_attention_heads
    attn = Attention.Config(width, n_heads, width // n_heads, qkv_bias=True, out_bias=True, causal=False)
    if hf.use_bottleneck_attention or not hf.use_bottleneck or width == d_model:
        return attn
    if not hf.key_query_shared_bottleneck:
        raise ValueError(
            "key_query_shared_bottleneck=False and use_bottleneck_attention=False: queries and keys of the wide stream, with "
            f"weights for vectors of {width} features, not {d_model}"
        )
    return ValueSourceAttention.Config(**vars(attn), d_value_source=d_model)


def rows(tree: EncoderConfig) -> list[Row]:
    layer, target = PREFIX + "encoder.layer.{l}.", "blocks.{l}."
    assert isinstance(tree.embed.embed, TrigramEmbed.Config)
    narrow = tree.embed.embed.d_embed
    found = [
        *bert_like.embedding_rows(PREFIX + "embeddings."),
        Row(PREFIX + "embeddings.embedding_transformation.weight", "embed.embed.W_proj", "m (t e) -> t e m", e=narrow),
        Row(PREFIX + "embeddings.embedding_transformation.bias", "embed.embed.b_proj"),
        *bert_like.layer_rows(layer),
        *bert_like.head_rows(tree, HEADS, PREFIX),
        Row(HEADS.decoder + ".weight", "unembed.W_vocab", "v m -> m v"),
        Row("cls.predictions.dense.weight", "unembed.W_rest"),
        *classic.linear(layer + "output.bottleneck.dense", target, "up"),
        *classic.norm(layer + "output.bottleneck.LayerNorm", target + "ln3"),
    ]
    for source, ours in {"input": "bottleneck", "attention": "qk_bottleneck"}.items():
        found += bert_like.linear(f"{layer}bottleneck.{source}.dense", target + ours)
        found += classic.norm(f"{layer}bottleneck.{source}.LayerNorm", f"{target}{ours}.ln")
    for i in range(tree.blocks[0].n_ffn):
        found += classic.into_mlp(f"{layer}ffn.{i}.intermediate.dense", f"{target}ffn.{i}.mlp.")
        found += classic.out_of_mlp(f"{layer}ffn.{i}.output.dense", f"{target}ffn.{i}.mlp.")
        found += classic.norm(f"{layer}ffn.{i}.output.LayerNorm", f"{target}ffn.{i}.ln")
    return found
