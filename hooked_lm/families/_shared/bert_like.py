"""Shared code for BERT-like models: bidirectional post-norm blocks, heads, and the tensor names.

Configs of encoders do not list a checkpoint's heads, so the tensor names determine them.
"""

from dataclasses import dataclass, replace
from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import BlockSparse
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed, ProjectedEncoderEmbed, TokenTypeEmbed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.heads import Classifier, MLMHead, NSPHead, Pooler, SpanClassifier, TokenClassifier
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

IGNORED = ("*position_ids",)
# training options, and fields of the first checkpoints that no model uses
NO_EFFECT = (
    *("gradient_checkpointing", "output_past", "directionality", "pooler_*", "padding_idx"),
    *("sbert_ce_*", "sentence_transformers"),  # post-processing of scores
)
# norm weights in the first checkpoints
RENAMED = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}

BlockClass = type[PreNormBlock] | type[PostNormBlock]


def check_bidirectional(hf: HFConfig) -> None:
    """Raises ValueError for options that turn an encoder into a decoder, and for other position embeddings."""
    if hf.get("is_decoder") or hf.get("add_cross_attention"):
        raise ValueError("is_decoder or add_cross_attention: an encoder that was made a decoder is not supported")
    hf.ignored_by_transformers(position_embedding_type="absolute")


def layer_norm(hf: HFConfig, d: int | None = None) -> LayerNorm.Config:
    """A layer norm of width `d`, by default `hidden_size`."""
    return LayerNorm.Config(d or hf.hidden_size, hf.layer_norm_eps)


def attention(hf: HFConfig, kind: type[Attention.Config] = Attention.Config, **options: Any) -> Attention.Config:
    """The attention of a layer, of this kind."""
    d_model, n_heads = hf.hidden_size, hf.num_attention_heads
    return kind(
        d_model, n_heads, d_model // n_heads, **{"qkv_bias": True, "out_bias": True, "causal": False, **options}
    )


def windows_on_both_sides(hf: HFConfig, n_layers: int) -> list[int]:
    """The windows of a Longformer, whose `attention_window` counts the keys before and after a query."""
    widths = hf.attention_window if isinstance(hf.attention_window, list) else [hf.attention_window] * n_layers
    return [width // 2 + 1 for width in widths]


def block_sparse(hf: HFConfig) -> BlockSparse | None:
    """Which keys a BigBird attends to in a long text; None: to all. Raises ValueError for an unknown `attention_type`."""
    kinds = {"original_full": None, "block_sparse": BlockSparse(hf.block_size, hf.num_random_blocks)}
    if hf.attention_type not in kinds:
        raise ValueError(f"attention_type={hf.attention_type!r} is not supported; {' and '.join(kinds)} are")
    return kinds[hf.attention_type]


def blocks(hf: HFConfig, attn: Any, kind: BlockClass = PostNormBlock) -> tuple[Any, ...]:
    """The layers; `kind` is the class of the blocks."""
    norm, mlp = layer_norm(hf), MLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act)
    return (kind.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.num_hidden_layers


def with_norms_before(hf: HFConfig, tree: EncoderConfig) -> EncoderConfig:
    """The tree with norms before the sublayers and after the last block, instead of after each sublayer."""
    return replace(tree, blocks=blocks(hf, attention(hf), PreNormBlock), ln_final=layer_norm(hf))


def embed(hf: HFConfig, offset: int = 0, n_types: int = 0, d_embed: int | None = None) -> EncoderEmbed.Config:
    """The embeddings of width `d_embed`, by default `hidden_size`; positions are counted from `offset`."""
    width = d_embed or hf.hidden_size
    parts: dict[str, Any] = {
        "embed": Embed.Config(hf.vocab_size, width),
        "pos_embed": PosEmbed.Config(hf.max_position_embeddings - offset, width, offset),
        "token_type_embed": TokenTypeEmbed.Config(n_types, width) if n_types else None,
        "norm": layer_norm(hf, width),
    }
    return EncoderEmbed.Config(**parts)


def projected(narrow: EncoderEmbed.Config, d_model: int) -> ProjectedEncoderEmbed.Config:
    """The embeddings, followed by a linear map to the width of the residual stream."""
    return ProjectedEncoderEmbed.Config(**vars(narrow), d_stream=d_model)


# ---- heads -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """The tensor names of a family's heads, without the prefix of the base model.

    `mlm`, `mlm_norm` and `decoder` are the linear layer, norm and unembedding of the masked-token head. The unembedding's
    bias is `bias` if the unembedding is tied to the embedding, else `untied_bias`; the other one is a copy or unused. A
    text classifier uses the base model's pooler, or the linear layers `text_dense` and `text_out`.
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
    """The heads of a checkpoint, by field of `EncoderConfig`. The masked-token head has the width of the embeddings.

    `acts` are the activations of `mlm` (default gelu), `pooler` (tanh) and `text` (tanh).
    """
    norm, found = norm or layer_norm(hf), dict[str, Any]()
    d_model = norm.d_model
    tied, n_labels = bool(hf.get("tie_word_embeddings", True)), len(hf.get("id2label") or (0, 1))
    if hf.holds(names.mlm + ".weight"):
        width = d_embed or d_model
        bias = None if tied or names.bias == names.untied_bias else hf.vocab_size
        act_fn = acts.get("mlm", "gelu")
        found["mlm_head"] = MLMHead.Config(d_model, width, act_fn, replace(norm, d_model=width), unread_bias=bias)
        found["unembed"] = Unembed.Config(width, hf.vocab_size, bias=True, tied=tied)
    if hf.holds(names.pooler + ".weight"):
        found["pooler"] = Pooler.Config(d_model, acts.get("pooler", "tanh"))
    if hf.holds(names.nsp + ".weight"):
        n_classes = n_labels if names.nsp.startswith("sop") else 2
        found["nsp_head"] = NSPHead.Config(d_model, n_classes)
    if names.text_dense is not None and hf.holds(names.text_dense + ".weight"):
        unread = names.pooler != names.text_dense and "pooler" in found
        found["pooler"] = Pooler.Config(d_model, acts.get("text", "tanh"), unread=unread)
        found["classifier"] = Classifier.Config(d_model, n_labels)
    elif hf.holds(names.question + ".weight"):
        found["token_classifier"] = SpanClassifier.Config(d_model, n_labels)
    elif hf.holds(names.classifier + ".weight"):
        found |= _one_layer(hf, d_model, n_labels)
    return found


def _one_layer(hf: HFConfig, d_model: int, n_labels: int) -> dict[str, Any]:
    """A classifier with one linear layer. Only the transformers class tells whether it classifies tokens or texts."""
    name = next(iter(hf.get("architectures") or ()), "")
    if name.endswith("ForMultipleChoice"):
        raise ValueError(f"{name}: a head that compares several texts is not supported; load the model without it")
    if name.endswith("ForTokenClassification"):
        return {"token_classifier": TokenClassifier.Config(d_model, n_labels)}
    return {"classifier": Classifier.Config(d_model, n_labels)}


# ---- rows ------------------------------------------------------------------------------------------------------------


def linear(source: str, target: str) -> list[Row]:
    """Rows of a linear layer of a head."""
    return [Row(source + ".weight", target + ".W", "o m -> m o"), Row(source + ".bias", target + ".b")]


def embedding_rows(source: str, norm: str = "LayerNorm", embed: EncoderEmbed.Config | None = None) -> list[Row]:
    """Rows of the token, type and position embeddings and their norm; `embed` is needed if positions have an offset."""
    return [
        Row(source + "word_embeddings.weight", "embed.embed.W_E"),
        Row(source + "token_type_embeddings.weight", "embed.token_type_embed.W_token_type"),
        *classic.positions(source + "position_embeddings.weight", "embed.pos_embed", embed and embed.pos_embed),
        *classic.norm(source + norm, "embed.ln"),
    ]


def projection_rows(source: str) -> list[Row]:
    """Rows of the projection from narrow embeddings into the residual stream."""
    return [Row(source + ".weight", "embed.W_proj", "m e -> e m"), Row(source + ".bias", "embed.b_proj")]


def layer_rows(source: str, ln1: str = "attention.output.LayerNorm", ln2: str = "output.LayerNorm") -> list[Row]:
    """Rows of a layer with BERT's tensor names, apart from those of the norms."""
    attn = source + "attention.self."
    return [
        *classic.into_attention(attn + "query", attn + "key", attn + "value"),
        *classic.out_of_attention(source + "attention.output.dense"),
        *classic.norm(source + ln1, "blocks.{l}.ln1"),
        *classic.into_mlp(source + "intermediate.dense"),
        *classic.out_of_mlp(source + "output.dense"),
        *classic.norm(source + ln2, "blocks.{l}.ln2"),
    ]


def rows(tree: EncoderConfig, names: Names, prefix: str, **norms: str) -> list[Row]:
    """Rows of a whole model with BERT's tensor names; `norms` are those of the norms in a layer."""
    return [
        *embedding_rows(prefix + "embeddings.", embed=tree.embed),
        *layer_rows(prefix + "encoder.layer.{l}.", **norms),
        *head_rows(tree, names, prefix),
    ]


def head_rows(tree: EncoderConfig, names: Names, prefix: str) -> list[Row]:
    """Rows of the heads. If several heads share a tensor name, only the head in the tree is included."""
    found = linear(names.nsp, "nsp_head")
    if tree.unembed is not None:
        found += mlm_rows(names, prefix if tree.unembed.tied else None)
    if tree.classifier is not None and names.text_dense is not None:
        unread = prefix + names.pooler  # the pooler of the base model, which such a head does not read
        found += [Row(unread + ".weight", "pooler.W_unread", "o m -> m o"), Row(unread + ".bias", "pooler.b_unread")]
        return [*found, *linear(names.text_dense, "pooler"), *linear(names.text_out, "classifier")]
    found += linear(prefix + names.pooler, "pooler")
    if isinstance(tree.token_classifier, SpanClassifier.Config):
        return [*found, *linear(names.question, "token_classifier")]
    return [*found, *linear(names.classifier, "token_classifier" if tree.classifier is None else "classifier")]


def mlm_rows(names: Names, prefix: str | None) -> list[Row]:
    """Rows of the masked-token head. `prefix` is the base model's if the unembedding is tied to its embedding, else None."""
    bias, other = (names.untied_bias, names.bias) if prefix is None else (names.bias, names.untied_bias)
    tied = None if prefix is None else prefix + names.embedding
    found = [
        *linear(names.mlm, "mlm_head"),
        *classic.norm(names.mlm_norm, "mlm_head.ln"),
        Row(names.decoder + ".weight", "unembed.W_U", "v m -> m v", tied=tied),
        Row(bias, "unembed.b_U"),
    ]
    if other == bias:
        return found
    if prefix is None:
        return [*found, Row(other, "mlm_head.b_unread")]
    return [*found, Row(other, "unembed.b_U, repeated", tied=bias)]
