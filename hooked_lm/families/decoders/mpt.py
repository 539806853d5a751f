"""MPT (MosaicML 2023, Introducing MPT-7B): ALiBi, no biases in linear layers and norms."""

from typing import Any

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Alibi
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "transformer."
PREPENDS_BOS = False
IGNORED = ()
NO_EFFECT = (
    *("init_device", "init_config", "verbose", "tokenizer_name", "embedding_fraction", "learned_pos_emb"),
    "expansion_ratio",  # transformers always has 4
)

# What transformers computes with in place of other fields of `attn_config`.
ATTENTION = {
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "attn_uses_sequence_id": False,
    "alibi": True,
    "alibi_bias_max": 8,
}


def config(hf: HFConfig) -> DecoderConfig:
    d_model = hf.d_model
    hf.ignored_by_transformers(logit_scale=None, no_bias=True)
    if hf.norm_type != "layernorm":  # the same in another precision
        hf.ignored_by_transformers(norm_type="low_precision_layernorm")
    norm = LayerNorm.Config(d_model, hf.layer_norm_epsilon, bias=False)
    block = PreNormBlock.Config(
        attn=attention(d_model, hf.n_heads, hf.attn_config),
        ln1=norm,
        mlp=MLP.Config(d_model, 4 * d_model, "gelu", bias=False),
        ln2=norm,
    )
    return DecoderConfig(
        n_ctx=hf.max_seq_len,
        embed=Embed.Config(hf.vocab_size, d_model),
        blocks=(block,) * hf.n_layers,
        ln_final=norm,
        unembed=Unembed.Config(d_model, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def attention(d_model: int, n_heads: int, fields: dict[str, Any]) -> Attention.Config:
    """The attention of a layer, from the nested `attn_config`. Raises ValueError for unsupported fields."""
    hf = HFConfig(fields, {})
    hf.ignored_by_transformers(**ATTENTION)
    attn = Attention.Config(
        d_model,
        n_heads,
        d_model // n_heads,
        scale=hf.get("softmax_scale"),
        clip=hf.get("clip_qkv") or None,
        position_bias=Alibi(n_heads),
    )
    if unread := hf.unread(("attn_impl",)):
        raise ValueError(
            "fields of attn_config that are not supported: " + ", ".join(f"{name}={v!r}" for name, v in unread.items())
        )
    return attn


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "transformer.blocks.{l}.", "blocks.{l}."
    return [
        Row("transformer.wte.weight", "embed.W_E"),
        Row(source + "norm_1.weight", target + "ln1.w"),
        *classic.stacked_attention(source + "attn.Wqkv"),
        *classic.out_of_attention(source + "attn.out_proj"),
        Row(source + "norm_2.weight", target + "ln2.w"),
        *classic.into_mlp(source + "ffn.up_proj"),
        *classic.out_of_mlp(source + "ffn.down_proj"),
        Row("transformer.norm_f.weight", "ln_final.w"),
        *classic.head("lm_head", tree, "transformer.wte.weight"),
    ]
