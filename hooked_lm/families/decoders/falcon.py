"""Falcon (Almazrouei et al. 2023, arXiv:2311.16867): multi-head, grouped-query or multi-query attention; sublayers in
parallel after one or two norms, or in sequence; rotary positions or ALiBi."""

import torch

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Alibi
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.parallel import ParallelBlock, SharedNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "transformer."
IGNORED = ("*.inv_freq",)


def config(hf: HFConfig) -> DecoderConfig:
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_epsilon)
    mlp = MLP.Config(hf.hidden_size, hf.ffn_hidden_size, hf.activation, bias=hf.bias)
    kind = block_kind(hf)
    block = kind.Config(attn=attention(hf), ln1=norm, mlp=mlp, ln2=None if kind is SharedNormBlock else norm)
    return DecoderConfig(
        n_ctx=hf.max_position_embeddings if hf.alibi else n_ctx(hf),
        embed=Embed.Config(hf.vocab_size, hf.hidden_size),
        blocks=(block,) * hf.num_hidden_layers,
        ln_final=norm,
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def attention(hf: HFConfig) -> Attention.Config:
    """The attention of a layer. ALiBi biases are rounded to bf16 and scaled with the scores, as in training."""
    n_heads, d_head = hf.num_attention_heads, hf.hidden_size // hf.num_attention_heads
    new, n_kv = hf.new_decoder_architecture, hf.num_kv_heads
    if hf.multi_query and not new:
        n_kv = 1
    if not new and n_kv not in (1, n_heads):
        raise ValueError(f"num_kv_heads={n_kv} of {n_heads} heads needs new_decoder_architecture=True")
    hf.get("rope_parameters")  # no effect with ALiBi
    return Attention.Config(
        hf.hidden_size,
        n_heads,
        d_head,
        n_key_value_heads=n_kv,
        qkv_bias=hf.bias,
        out_bias=hf.bias,
        rotary=None if hf.alibi else rotary(hf, d_head),
        position_bias=Alibi(n_heads, scale=d_head**-0.5, rounded=torch.bfloat16) if hf.alibi else None,
    )


def block_kind(hf: HFConfig) -> type[PreNormBlock] | type[ParallelBlock] | type[SharedNormBlock]:
    """The class of the blocks. Raises ValueError for combinations that transformers does not support either."""
    new, n_norms = hf.new_decoder_architecture, hf.num_ln_in_parallel_attn
    if not hf.parallel_attn:
        if new:
            raise ValueError("new_decoder_architecture=True needs parallel_attn=True")
        return PreNormBlock
    if n_norms is None:
        n_norms = 2 if new else 1
    if n_norms not in (1, 2) or (n_norms == 2 and not new):
        raise ValueError(f"num_ln_in_parallel_attn={n_norms} does not go with new_decoder_architecture={new}")
    return ParallelBlock if n_norms == 2 else SharedNormBlock


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "transformer.h.{l}.", "blocks.{l}."
    two = isinstance(tree.blocks[0], ParallelBlock.Config)
    return [
        Row("transformer.word_embeddings.weight", "embed.W_E"),
        *classic.norm(source + ("ln_attn" if two else "input_layernorm"), target + "ln1"),
        *classic.fused_by_group(source + "self_attention.query_key_value", tree),
        *classic.out_of_attention(source + "self_attention.dense"),
        *classic.norm(source + ("ln_mlp" if two else "post_attention_layernorm"), target + "ln2"),
        *classic.into_mlp(source + "mlp.dense_h_to_4h"),
        *classic.out_of_mlp(source + "mlp.dense_4h_to_h"),
        *classic.norm("transformer.ln_f", "ln_final"),
        *classic.head("lm_head", tree, "transformer.word_embeddings.weight"),
    ]
