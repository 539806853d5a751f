"""OLMo (Groeneveld et al. 2024, arXiv:2402.00838): layer norms without weights, clipped queries, keys and values."""

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    norm = LayerNorm.Config(hf.hidden_size, 1e-5, weight=False, bias=False)
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias, clip=hf.clip_qkv)
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=llama_like.gated_mlp(hf), ln2=norm)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm)
