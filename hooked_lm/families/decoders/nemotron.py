"""Nemotron-4 and Minitron (Parmar et al. 2024, arXiv:2402.16819): squared ReLU without a gate, partial rotary, layer norm
weights stored minus one."""

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# the first is repeated in `rope_parameters`; the width of heads is `head_dim`
NO_EFFECT = ("partial_rotary_factor", "kv_channels")


def config(hf: HFConfig) -> DecoderConfig:
    norm = LayerNorm.Config(hf.hidden_size, hf.norm_eps, offset=1.0)
    attn = llama_like.attention(hf, partial=True, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias)
    mlp = MLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act, hf.mlp_bias)
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *llama_like.attention_rows(),
        *llama_like.mlp_rows(),
    ]
