"""Persimmon (Elsen et al. 2023, Releasing Persimmon-8B): normalised queries and keys, half of each head rotary."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "model."
IGNORED = ("*.rotary_emb.inv_freq",)


def config(hf: HFConfig) -> DecoderConfig:
    d_head = hf.hidden_size // hf.num_attention_heads
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps)
    attn = Attention.Config(
        hf.hidden_size,
        hf.num_attention_heads,
        d_head,
        qkv_bias=True,
        out_bias=True,
        rotary=rotary(hf, d_head, partial=True),
        qk_norm=LayerNorm.Config(d_head, hf.layer_norm_eps) if hf.qk_layernorm else None,
    )
    mlp = MLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act)
    return DecoderConfig(
        n_ctx=n_ctx(hf),
        embed=Embed.Config(hf.vocab_size, hf.hidden_size),
        blocks=(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.num_hidden_layers,
        ln_final=norm,
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.", "blocks.{l}."
    attn = source + "self_attn."
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        *classic.norm(source + "input_layernorm", target + "ln1"),
        *classic.fused_by_group(attn + "query_key_value", tree),
        *classic.norm(attn + "q_layernorm", target + "attn.q_norm"),
        *classic.norm(attn + "k_layernorm", target + "attn.k_norm"),
        *classic.out_of_attention(attn + "dense"),
        *classic.norm(source + "post_attention_layernorm", target + "ln2"),
        *classic.into_mlp(source + "mlp.dense_h_to_4h"),
        *classic.out_of_mlp(source + "mlp.dense_4h_to_h"),
        *classic.norm("model.final_layernorm", "ln_final"),
        *classic.head("lm_head", tree, "model.embed_tokens.weight"),
    ]
