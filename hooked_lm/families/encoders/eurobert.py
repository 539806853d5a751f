"""EuroBERT (Boizard et al. 2025, arXiv:2503.05500): a LLaMA with bidirectional attention that predicts masked tokens."""

from typing import Any

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed
from hooked_lm.components.heads import Classifier, Pooler, TokenClassifier
from hooked_lm.families._shared import bert_like, classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = (*bert_like.NO_EFFECT, "classifier_pooling")  # read if the checkpoint classifies texts


def config(hf: HFConfig) -> EncoderConfig:
    bias, norm = hf.attention_bias, llama_like.rms_norm(hf)
    attn = llama_like.attention(hf, qkv_bias=bias, out_bias=bias, causal=False)
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=llama_like.gated_mlp(hf, hf.mlp_bias), ln2=norm)
    return EncoderConfig(
        n_ctx=n_ctx(hf),
        embed=EncoderEmbed.Config(Embed.Config(hf.vocab_size, hf.hidden_size)),
        blocks=(block,) * hf.num_hidden_layers,
        ln_final=norm,
        **heads(hf),
    )


def heads(hf: HFConfig) -> dict[str, Any]:
    """The checkpoint's head, by field of `EncoderConfig`."""
    d_model, n_labels, tied = hf.hidden_size, len(hf.get("id2label") or (0, 1)), hf.tie_word_embeddings
    name = next(iter(hf.get("architectures") or ()), "")
    if hf.holds("lm_head.weight") or name.endswith("ForMaskedLM"):  # files do not contain a tied unembedding
        return {"unembed": Unembed.Config(d_model, hf.vocab_size, bias=hf.mlp_bias, tied=tied)}
    if hf.holds("dense.weight"):
        if (kind := hf.classifier_pooling) not in ("bos", "mean", "late"):
            raise ValueError(f"classifier_pooling={kind!r} is not supported; 'bos', 'mean' and 'late' are")
        pooler = Pooler.Config(d_model, "gelu", mean=kind != "bos", pools_last=kind == "late")
        return {"pooler": pooler, "classifier": Classifier.Config(d_model, n_labels)}
    if hf.holds("classifier.weight"):
        return {"token_classifier": TokenClassifier.Config(d_model, n_labels)}
    return {}


def rows(tree: EncoderConfig) -> list[Row]:
    embedding = "model.embed_tokens.weight"
    return [
        Row(embedding, "embed.embed.W_E"),
        *llama_like.norm_rows(),
        *llama_like.attention_rows(),
        *llama_like.mlp_rows(),
        *classic.norm("model.norm", "ln_final"),
        *classic.head("lm_head", tree, embedding),
        *bert_like.linear("dense", "pooler"),
        *bert_like.linear("classifier", "classifier" if tree.classifier else "token_classifier"),
    ]
