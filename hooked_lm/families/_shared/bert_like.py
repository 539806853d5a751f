"""What BERT and its descendants share: post-norm blocks that see both ways, heads, and the names on disk.

The names of the weights show which heads a checkpoint has, as configs of encoders do not say it.
"""

from dataclasses import dataclass, replace
from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embed import Embed, Unembed
from hooked_lm.components.encoder_embed import EncoderEmbed, ProjectedEncoderEmbed, TokenTypeEmbed
from hooked_lm.components.heads import Classifier, MLMHead, NSPHead, Pooler, SpanClassifier, TokenClassifier
from hooked_lm.components.layer_norm import LayerNorm
from hooked_lm.components.mlp import MLP
from hooked_lm.components.pos_embed import PosEmbed
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

IGNORED = ("*position_ids",)
# how it was trained; and leftovers of the first checkpoints, which no model reads
NO_EFFECT = (
    *("gradient_checkpointing", "output_past", "directionality", "pooler_*", "padding_idx"),
    *("sbert_ce_*", "sentence_transformers"),  # what is done with the scores afterwards
)
# how the first checkpoints called the weights of norms
RENAMED = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}


def check_bidirectional(hf: HFConfig) -> None:
    """Raises ValueError for options that turn an encoder into a decoder, and for kinds of positions that are not supported."""
    if hf.get("is_decoder") or hf.get("add_cross_attention"):
        raise ValueError("is_decoder or add_cross_attention: an encoder that was made a decoder is not supported")
    if (kind := hf.get("position_embedding_type", "absolute")) not in (None, "absolute"):
        raise ValueError(f"position_embedding_type={kind!r} is not supported here; 'absolute' is")


def layer_norm(hf: HFConfig, d: int | None = None) -> LayerNorm.Config:
    """A norm of this width."""
    return LayerNorm.Config(d or hf.hidden_size, hf.layer_norm_eps)


def attention(hf: HFConfig, **options: Any) -> Attention.Config:
    """The attention of a layer."""
    d_model, n_heads = hf.hidden_size, hf.num_attention_heads
    return Attention.Config(d_model, n_heads, d_model // n_heads, qkv_bias=True, out_bias=True, causal=False, **options)


def blocks(hf: HFConfig, attn: Any) -> tuple[PostNormBlock.Config, ...]:
    """The layers."""
    norm, mlp = layer_norm(hf), MLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act)
    return (PostNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.num_hidden_layers


def embed(hf: HFConfig, offset: int = 0, n_types: int = 0, d_embed: int | None = None) -> EncoderEmbed.Config:
    """The embeddings: positions counted from `offset`, vectors of `d_embed` that may be narrower than the stream."""
    width = d_embed or hf.hidden_size
    parts: dict[str, Any] = {
        "embed": Embed.Config(hf.vocab_size, width),
        "pos_embed": PosEmbed.Config(hf.max_position_embeddings - offset, width, offset),
        "token_type_embed": TokenTypeEmbed.Config(n_types, width) if n_types else None,
        "norm": layer_norm(hf, width),
    }
    return EncoderEmbed.Config(**parts)


def projected(narrow: EncoderEmbed.Config, d_model: int) -> ProjectedEncoderEmbed.Config:
    """The embeddings, followed by a linear map into the stream."""
    return ProjectedEncoderEmbed.Config(**vars(narrow), d_stream=d_model)


# ---- heads -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """Where the heads of a family lie in its files, without the prefix of the base model.

    `mlm`, `mlm_norm` and `decoder` are linear layer, norm and unembedding of the head for masked tokens. The unembedding's
    bias is `bias` if it is tied to the embedding, else `untied_bias`; the other is then a copy of it, or is not used. A
    classifier of texts reads the base model's pooler, or it has a
    layer `text_dense` of its own, and `text_out` after that.
    """

    mlm: str = "lm_head.dense"
    mlm_norm: str = "lm_head.layer_norm"
    decoder: str = "lm_head.decoder"
    bias: str = "lm_head.bias"
    untied_bias: str = "lm_head.decoder.bias"
    embedding: str = "embeddings.word_embeddings.weight"
    pooler: str = "pooler.dense"
    nsp: str = "cls.seq_relationship"
    text_dense: str | None = "classifier.dense"
    text_out: str = "classifier.out_proj"
    classifier: str = "classifier"
    question: str = "qa_outputs"


ROBERTA = Names()


def heads(
    hf: HFConfig, names: Names, norm: LayerNorm.Config | None = None, d_embed: int | None = None, **acts: str
) -> dict[str, Any]:
    """The heads that a checkpoint has, that for masked tokens as wide as the embeddings. `acts` are the activations of
    `mlm` (gelu), `pooler` (tanh), `text` (tanh)."""
    norm, found = norm or layer_norm(hf), dict[str, Any]()
    d_model = norm.d_model
    tied, n_labels = bool(hf.tie_word_embeddings), len(hf.get("id2label") or (0, 1))
    if hf.holds(names.mlm + ".weight"):
        width = d_embed or d_model
        unread = None if tied or names.bias == names.untied_bias else hf.vocab_size
        act_fn = acts.get("mlm", "gelu")
        found["mlm_head"] = MLMHead.Config(d_model, width, act_fn, replace(norm, d_model=width), unread_bias=unread)
        found["unembed"] = Unembed.Config(width, hf.vocab_size, bias=True, tied=tied)
    if hf.holds(names.pooler + ".weight"):
        found["pooler"] = Pooler.Config(d_model, acts.get("pooler", "tanh"))
    if hf.holds(names.nsp + ".weight"):
        n_classes = n_labels if names.nsp.startswith("sop") else 2
        found["nsp_head"] = NSPHead.Config(d_model, n_classes)
    if names.text_dense is not None and hf.holds(names.text_dense + ".weight"):
        found["pooler"] = Pooler.Config(d_model, acts.get("text", "tanh"))
        found["classifier"] = Classifier.Config(d_model, n_labels)
    elif hf.holds(names.question + ".weight"):
        found["token_classifier"] = SpanClassifier.Config(d_model, n_labels)
    elif hf.holds(names.classifier + ".weight"):
        found |= _one_layer(hf, d_model, n_labels)
    return found


def _one_layer(hf: HFConfig, d_model: int, n_labels: int) -> dict[str, Any]:
    """A classifier that is one linear layer: of what, only the class of transformers says."""
    name = next(iter(hf.get("architectures") or ()), "")
    if name.endswith("ForMultipleChoice"):
        raise ValueError(f"{name}: a head that compares several texts is not supported; load the model without it")
    if name.endswith("ForTokenClassification"):
        return {"token_classifier": TokenClassifier.Config(d_model, n_labels)}
    return {"classifier": Classifier.Config(d_model, n_labels)}


# ---- rows ------------------------------------------------------------------------------------------------------------


def linear(theirs: str, ours: str) -> list[Row]:
    """A linear layer of a head."""
    return [Row(theirs + ".weight", ours + ".W", "o m -> m o"), Row(theirs + ".bias", ours + ".b")]


def embedding_rows(theirs: str, norm: str = "LayerNorm") -> list[Row]:
    """Embeddings of tokens, types and positions, and their norm."""
    return [
        Row(theirs + "word_embeddings.weight", "embed.embed.W_E"),
        Row(theirs + "token_type_embeddings.weight", "embed.token_type_embed.W_token_type"),
        Row(theirs + "position_embeddings.weight", "embed.pos_embed.W_pos"),
        *classic.norm(theirs + norm, "embed.ln"),
    ]


def projection_rows(theirs: str) -> list[Row]:
    """From narrow embeddings into the stream."""
    return [Row(theirs + ".weight", "embed.W_proj", "m e -> e m"), Row(theirs + ".bias", "embed.b_proj")]


def layer_rows(theirs: str) -> list[Row]:
    """A layer by the names of BERT."""
    attn = theirs + "attention.self."
    return [
        *classic.into_attention(attn + "query", attn + "key", attn + "value"),
        *classic.out_of_attention(theirs + "attention.output.dense"),
        *classic.norm(theirs + "attention.output.LayerNorm", "blocks.{l}.ln1"),
        *classic.into_mlp(theirs + "intermediate.dense"),
        *classic.out_of_mlp(theirs + "output.dense"),
        *classic.norm(theirs + "output.LayerNorm", "blocks.{l}.ln2"),
    ]


def head_rows(tree: EncoderConfig, names: Names, prefix: str) -> list[Row]:
    """The heads; of those under one name in several classes, the one that the tree has."""
    found = linear(names.nsp, "nsp_head")
    if tree.unembed is not None:
        found += mlm_rows(names, prefix if tree.unembed.tied else None)
    if tree.classifier is not None and names.text_dense is not None:
        return [*found, *linear(names.text_dense, "pooler"), *linear(names.text_out, "classifier")]
    found += linear(prefix + names.pooler, "pooler")
    if isinstance(tree.token_classifier, SpanClassifier.Config):
        return [*found, *linear(names.question, "token_classifier")]
    return [*found, *linear(names.classifier, "token_classifier" if tree.classifier is None else "classifier")]


def mlm_rows(names: Names, prefix: str | None) -> list[Row]:
    """The head for masked tokens, tied to the embedding of a base model with this prefix if there is one."""
    bias, other = (names.untied_bias, names.bias) if prefix is None else (names.bias, names.untied_bias)
    found = [
        *linear(names.mlm, "mlm_head"),
        *classic.norm(names.mlm_norm, "mlm_head.ln"),
        Row(
            names.decoder + ".weight",
            "unembed.W_U",
            "v m -> m v",
            tied=None if prefix is None else prefix + names.embedding,
        ),
        Row(bias, "unembed.b_U"),
    ]
    if other == bias:
        return found
    if prefix is None:
        return [*found, Row(other, "mlm_head.b_unread")]
    return [*found, Row(other, "unembed.b_U, repeated", tied=bias)]
