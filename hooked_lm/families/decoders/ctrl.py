"""CTRL (Keskar et al. 2019, arXiv:1909.05858): sinusoidal positions, scaled embeddings, a bias on the logits."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.pos_embed import SinusoidalEmbed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "transformer."
IGNORED = ()
NO_EFFECT = ("n_ctx", "output_past")


def config(hf: HFConfig) -> DecoderConfig:
    d_model = hf.n_embd
    attn = Attention.Config(d_model, hf.n_head, d_model // hf.n_head, qkv_bias=True, out_bias=True)
    norm = LayerNorm.Config(d_model, 1e-6)
    return DecoderConfig(
        n_ctx=hf.n_positions,
        embed=Embed.Config(hf.vocab_size, d_model, scale=d_model**0.5),
        pos_embed=SinusoidalEmbed.Config(d_model),
        blocks=(PreNormBlock.Config(attn=attn, ln1=norm, mlp=MLP.Config(d_model, hf.dff, "relu"), ln2=norm),)
        * hf.n_layer,
        ln_final=LayerNorm.Config(d_model, hf.layer_norm_epsilon),
        unembed=Unembed.Config(d_model, hf.vocab_size, bias=True, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "transformer.h.{l}.", "blocks.{l}."
    attn = source + "multi_head_attention."
    return [
        Row("transformer.w.weight", "embed.W_E"),
        *classic.norm(source + "layernorm1", target + "ln1"),
        *classic.into_attention(attn + "Wq", attn + "Wk", attn + "Wv"),
        *classic.out_of_attention(attn + "dense"),
        *classic.norm(source + "layernorm2", target + "ln2"),
        *classic.into_mlp(source + "ffn.0"),
        *classic.out_of_mlp(source + "ffn.2"),
        *classic.norm("transformer.layernorm", "ln_final"),
        *classic.head("lm_head", tree, "transformer.w.weight"),
    ]
