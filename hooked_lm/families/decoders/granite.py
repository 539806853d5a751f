"""Granite 3 (Granite Team, IBM 2024, "Granite 3.0 Language Models"): LLaMA with multipliers of
embedding, scores, sublayer outputs and logits."""

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]

PREPENDS_BOS = False


def config(hf: HFConfig) -> DecoderConfig:
    norm = llama_like.rms_norm(hf)
    attn = llama_like.attention(
        hf, scale=float(hf.attention_multiplier), qkv_bias=hf.attention_bias, out_bias=hf.attention_bias
    )
    block = PreNormBlock.Config(
        attn=attn,
        ln1=norm,
        mlp=llama_like.gated_mlp(hf, hf.mlp_bias),
        ln2=norm,
        residual_scale=float(hf.residual_multiplier),
    )
    blocks = [block] * hf.num_hidden_layers
    return llama_like.around(hf, blocks, norm, float(hf.embedding_multiplier), logit_scale=1 / hf.logits_scaling)
