"""ESM Cambrian (EvolutionaryScale 2024): a language model of proteins, a bidirectional LLaMA with layer norms.

Queries and keys are normalised over all heads together, and sublayers scaled by the depth.
"""

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed
from hooked_lm.components.norms.layer_norm import JointLayerNorm, LayerNorm
from hooked_lm.families._shared import bert_like, classic, llama_like
from hooked_lm.families._shared.bert_like import NO_EFFECT, Names
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = "esmc."
IGNORED = ("*.rotary_emb.inv_freq",)
HEADS = Names(untied_bias="lm_head.decoder.bias", bias="lm_head.decoder.bias", classifier="score")


def config(hf: HFConfig) -> EncoderConfig:
    d_model, norm, bias = hf.hidden_size, LayerNorm.Config(hf.hidden_size), hf.attention_bias
    qk_norm = JointLayerNorm.Config(hf.head_dim, n_heads=hf.num_attention_heads)
    attn = llama_like.attention(hf, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias, causal=False)
    block = PreNormBlock.Config(
        attn=attn,
        ln1=norm,
        mlp=llama_like.gated_mlp(hf, hf.mlp_bias),
        ln2=norm,
        residual_scale=(hf.num_hidden_layers / 36) ** -0.5,
    )
    return EncoderConfig(
        n_ctx=n_ctx(hf),
        embed=EncoderEmbed.Config(Embed.Config(hf.vocab_size, d_model)),
        blocks=(block,) * hf.num_hidden_layers,
        ln_final=LayerNorm.Config(d_model, bias=False),
        **bert_like.heads(hf.changed(tie_word_embeddings=False), HEADS, norm),  # transformers never ties them
    )


def rows(tree: EncoderConfig) -> list[Row]:
    source = "esmc.layers.{l}."
    norms = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}
    return [
        Row("esmc.embed_tokens.weight", "embed.embed.W_E"),
        *(row for x, y in norms.items() for row in classic.norm(source + x, "blocks.{l}." + y)),
        *classic.attention(source + "self_attn."),
        Row(source + "self_attn.q_norm.weight", "blocks.{l}.attn.q_norm.w", "(n h) -> n h"),
        Row(source + "self_attn.k_norm.weight", "blocks.{l}.attn.k_norm.w", "(n h) -> n h"),
        *classic.gated_mlp(source + "mlp."),
        *classic.norm("esmc.norm", "ln_final"),
        *bert_like.head_rows(tree, HEADS, PREFIX),
    ]
