"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): norms around each sublayer, soft caps, every other layer local."""

from dataclasses import replace

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("hidden_act",)  # `hidden_activation` is used instead


def config(hf: HFConfig) -> DecoderConfig:
    norm = RMSNorm.Config(hf.hidden_size, hf.rms_norm_eps, offset=1.0)
    attn = llama_like.attention(
        hf,
        scale=hf.query_pre_attn_scalar**-0.5,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        soft_cap=hf.attn_logit_softcapping,
    )
    mlp = GatedMLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_activation)
    block = PreNormBlock.Config(attn=attn, ln1=norm, ln1_post=norm, mlp=mlp, ln2=norm, ln2_post=norm)
    return llama_like.around(
        hf,
        [replace(block, attn=replace(attn, window=window)) for window in llama_like.windows(hf)],
        norm,
        scale=hf.hidden_size**0.5,
        soft_cap=hf.final_logit_softcapping,
    )


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.outer_rows(tree),
        *llama_like.four_norm_rows(),
        *llama_like.attention_rows(),
        *llama_like.mlp_rows(),
    ]
