"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): rotary positions, gated MLPs, pre-norm blocks, some local layers."""

from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed
from hooked_lm.components.heads import Classifier, MLMHead, Pooler, SpanClassifier, TokenClassifier
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

PREFIX = "model."
IGNORED = ("*.rotary_emb.*inv_freq",)
# old names for `layer_types` and `rope_parameters`, training options, choices of implementation
NO_EFFECT = (
    *("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "sliding_window"),
    *("sparse_prediction", "sparse_pred_ignore_index", "initializer_cutoff_factor", "gradient_checkpointing"),
    *("sbert_ce_*", "sentence_transformers", "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"),
    *("position_embedding_type", "layer_norm_eps", "classifier_pooling", "classifier_bias", "classifier_activation"),
)


def config(hf: HFConfig) -> EncoderConfig:
    d_model, d_head = hf.hidden_size, hf.hidden_size // hf.num_attention_heads
    norm = LayerNorm.Config(d_model, hf.norm_eps, bias=hf.norm_bias)
    mlp = GatedMLP.Config(d_model, hf.intermediate_size, hf.hidden_activation, hf.mlp_bias)
    windows = {"full_attention": None, "sliding_attention": hf.local_attention // 2 + 1}
    blocks = [
        PreNormBlock.Config(
            attn=Attention.Config(
                d_model,
                hf.num_attention_heads,
                d_head,
                qkv_bias=hf.attention_bias,
                out_bias=hf.attention_bias,
                rotary=rotary(hf, d_head, layer_type),
                window=windows[layer_type],
                causal=False,
            ),
            ln1=norm if layer else None,  # the embedding is already normalised
            mlp=mlp,
            ln2=norm,
        )
        for layer, layer_type in zip(range(hf.num_hidden_layers), hf.layer_types, strict=True)
    ]
    return EncoderConfig(
        n_ctx=n_ctx(hf),
        embed=EncoderEmbed.Config(Embed.Config(hf.vocab_size, d_model), norm=norm),
        blocks=tuple(blocks),
        ln_final=norm,
        **heads(hf, norm),
    )


def heads(hf: HFConfig, norm: LayerNorm.Config) -> dict[str, Any]:
    """The checkpoint's head, by field of `EncoderConfig`: a linear layer, followed by the unembedding or a classifier."""
    d_model, act_fn, tied, bias = norm.d_model, hf.classifier_activation, hf.tie_word_embeddings, hf.decoder_bias
    if not hf.holds("head.dense.weight"):
        return {}
    transform = MLMHead.Config(d_model, d_model, act_fn, norm, hf.classifier_bias)
    if not hf.holds("classifier.weight"):
        return {"mlm_head": transform, "unembed": Unembed.Config(d_model, hf.vocab_size, bias=bias, tied=tied)}
    n_labels, name = len(hf.get("id2label") or (0, 1)), next(iter(hf.get("architectures") or ()), "")
    if name.endswith("ForMultipleChoice"):
        raise ValueError(f"{name}: a head that compares several texts is not supported; load the model without it")
    if name.endswith("ForTokenClassification"):
        return {"token_classifier": TokenClassifier.Config(d_model, n_labels, transform)}
    if name.endswith("ForQuestionAnswering"):
        return {"token_classifier": SpanClassifier.Config(d_model, n_labels, transform)}
    pooler = Pooler.Config(d_model, act_fn, hf.classifier_bias, norm, mean=hf.classifier_pooling == "mean")
    return {"pooler": pooler, "classifier": Classifier.Config(d_model, n_labels)}


def rows(tree: EncoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.", "blocks.{l}."
    embedding = "model.embeddings.tok_embeddings.weight"
    reads = "pooler" if tree.classifier else "token_classifier.transform" if tree.token_classifier else "mlm_head"
    return [
        Row(embedding, "embed.embed.W_E"),
        *classic.norm("model.embeddings.norm", "embed.ln"),
        *classic.norm(source + "attn_norm", target + "ln1"),
        *classic.stacked_attention(source + "attn.Wqkv"),
        *classic.out_of_attention(source + "attn.Wo"),
        *classic.norm(source + "mlp_norm", target + "ln2"),
        Row(source + "mlp.Wi.weight", target + "mlp.W_{x}", "(x f) m -> m f", x=["gate", "in"]),
        Row(source + "mlp.Wi.bias", target + "mlp.b_{x}", "(x f) -> f", x=["gate", "in"]),
        *classic.out_of_mlp(source + "mlp.Wo"),
        *classic.norm("model.final_norm", "ln_final"),
        *bert_like.linear("head.dense", reads),
        *classic.norm("head.norm", reads + ".ln"),
        *classic.head("decoder", tree, embedding),
        *bert_like.linear("classifier", "classifier" if tree.classifier else "token_classifier"),
    ]
