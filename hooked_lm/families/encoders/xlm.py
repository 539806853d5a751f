"""XLM (Conneau & Lample 2019, arXiv:1901.07291), trained on masked tokens and without embeddings of languages.

It is BERT without a layer between the last block and the unembedding.
"""

from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.heads import TokenClassifier
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row, expand

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = "transformer."
# initialisation, ids of special tokens, languages, and a head that searches for answers
NO_EFFECT = (
    *("init_std", "embed_init_std", "sinusoidal_embeddings", "*_index", "layerdrop", "start_n_top", "end_n_top"),
    *("lang_id", "lang2id", "id2lang", "max_vocab", "min_count", "same_enc_dec", "share_inout_emb"),
)


def config(hf: HFConfig) -> EncoderConfig:
    hf.require(causal=False, asm=False, is_encoder=True)
    embeds_languages, n_langs = hf.use_lang_emb, hf.n_langs
    if embeds_languages and n_langs > 1:
        raise ValueError(
            "use_lang_emb=True: embeddings of languages, which are an input beside the text, are not supported"
        )
    d_model, n_heads = hf.emb_dim, hf.n_heads
    norm = LayerNorm.Config(d_model, hf.layer_norm_eps)
    attn = Attention.Config(d_model, n_heads, d_model // n_heads, qkv_bias=True, out_bias=True, causal=False)
    mlp = MLP.Config(d_model, 4 * d_model, "gelu" if hf.gelu_activation else "relu")
    pos_embed = PosEmbed.Config(hf.max_position_embeddings, d_model)
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=EncoderEmbed.Config(Embed.Config(hf.vocab_size, d_model), pos_embed, norm=norm),
        blocks=(PostNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.n_layers,
        **heads(hf),
    )


def heads(hf: HFConfig) -> dict[str, Any]:
    """The checkpoint's head, by field of `EncoderConfig`."""
    tied = hf.tie_word_embeddings
    if hf.holds("pred_layer.proj.bias"):
        return {"unembed": Unembed.Config(hf.emb_dim, hf.vocab_size, bias=True, tied=tied)}
    if hf.holds("classifier.weight"):
        return {"token_classifier": TokenClassifier.Config(hf.emb_dim, len(hf.get("id2label") or (0, 1)))}
    return {}


def rows(tree: EncoderConfig) -> list[Row]:
    source, target = PREFIX + "attentions.{i}.", "blocks.{i}."
    layer = [
        *classic.into_attention(source + "q_lin", source + "k_lin", source + "v_lin", target + "attn."),
        *classic.out_of_attention(source + "out_lin", target + "attn."),
        *classic.norm(PREFIX + "layer_norm1.{i}", target + "ln1"),
        *classic.into_mlp(PREFIX + "ffns.{i}.lin1", target + "mlp."),
        *classic.out_of_mlp(PREFIX + "ffns.{i}.lin2", target + "mlp."),
        *classic.norm(PREFIX + "layer_norm2.{i}", target + "ln2"),
    ]
    return [
        Row(PREFIX + "embeddings.weight", "embed.embed.W_E"),
        Row(PREFIX + "position_embeddings.weight", "embed.pos_embed.W_pos"),
        *classic.norm(PREFIX + "layer_norm_emb", "embed.ln"),
        *expand(layer, i=len(tree.blocks)),
        *classic.head("pred_layer.proj", tree, PREFIX + "embeddings.weight"),
        *bert_like.linear("classifier", "token_classifier"),
    ]
