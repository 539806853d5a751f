"""Gemma (Gemma Team 2024, arXiv:2403.08295): norm weights stored minus one, a scaled embedding, a GELU gate."""

from dataclasses import replace

from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("hidden_activation",)  # `hidden_act` is used instead


def config(hf: HFConfig) -> DecoderConfig:
    norm = RMSNorm.Config(hf.hidden_size, hf.rms_norm_eps, offset=1.0)
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias)
    tree = llama_like.decoder(hf, attn)
    return replace(
        tree,
        embed=replace(tree.embed, scale=hf.hidden_size**0.5),
        blocks=tuple(replace(block, ln1=norm, ln2=norm) for block in tree.blocks),
        ln_final=norm,
    )
