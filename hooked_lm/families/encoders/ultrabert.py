"""UltraBERT (dmis-lab/UltraBERT-150M): EuroBERT with local layers, and two layers before the unembedding."""

from typing import Any

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed
from hooked_lm.components.heads import SpanClassifier, TokenClassifier, TwoLayerMLMHead
from hooked_lm.families._shared import bert_like, classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = "ultrabert."
NO_EFFECT = (*bert_like.NO_EFFECT, "classifier_pooling")


def config(hf: HFConfig) -> EncoderConfig:
    bias, norm, d_head = hf.attention_bias, llama_like.rms_norm(hf), llama_like.head_dim(hf)
    windows = llama_like.windows(hf)  # the greatest distance that a query sees
    blocks = [
        PreNormBlock.Config(
            attn=llama_like.attention(
                hf,
                rotary=rotary(hf, d_head, layer_type),
                qkv_bias=bias,
                out_bias=bias,
                window=None if window is None else window + 1,
                causal=False,
            ),
            ln1=norm,
            mlp=llama_like.gated_mlp(hf, hf.mlp_bias),
            ln2=norm,
        )
        for layer_type, window in zip(hf.layer_types, windows, strict=True)
    ]
    return EncoderConfig(
        n_ctx=n_ctx(hf),
        embed=EncoderEmbed.Config(Embed.Config(hf.vocab_size, hf.hidden_size)),
        blocks=tuple(blocks),
        ln_final=norm,
        **heads(hf),
    )


def heads(hf: HFConfig) -> dict[str, Any]:
    """The checkpoint's head, by field of `EncoderConfig`."""
    tied = hf.tie_word_embeddings
    d_model, width, n_labels = hf.hidden_size, hf.prediction_head_size, len(hf.get("id2label") or (0, 1))
    if hf.holds("head.linear1.weight"):
        head = TwoLayerMLMHead.Config(d_model, d_model, "gelu_pytorch_tanh", bias=False, d_inner=width)
        return {"mlm_head": head, "unembed": Unembed.Config(d_model, hf.vocab_size, tied=tied)}
    if hf.holds("qa_outputs.weight"):
        return {"token_classifier": SpanClassifier.Config(d_model, n_labels)}
    if not hf.holds("classifier.weight"):
        return {}
    if next(iter(hf.get("architectures") or ()), "").endswith("ForSequenceClassification"):
        raise ValueError("a classifier of texts without a layer after pooling is not supported; load the bare model")
    return {"token_classifier": TokenClassifier.Config(d_model, n_labels)}


def rows(tree: EncoderConfig) -> list[Row]:
    source = PREFIX + "layers.{l}."
    of_head = "qa_outputs" if isinstance(tree.token_classifier, SpanClassifier.Config) else "classifier"
    return [
        Row(PREFIX + "embed_tokens.weight", "embed.embed.W_E"),
        *classic.norm(source + "input_layernorm", "blocks.{l}.ln1"),
        *classic.attention(source + "self_attn."),
        *classic.norm(source + "post_attention_layernorm", "blocks.{l}.ln2"),
        *classic.gated_mlp(source + "mlp."),
        *classic.norm(PREFIX + "norm", "ln_final"),
        Row("head.linear1.weight", "mlm_head.inner.W", "o m -> m o"),
        Row("head.linear2.weight", "mlm_head.W", "o m -> m o"),
        *classic.head("cls", tree, PREFIX + "embed_tokens.weight"),
        *bert_like.linear(of_head, "token_classifier"),
    ]
