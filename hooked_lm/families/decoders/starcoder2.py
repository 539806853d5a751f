"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norms, biases in attention and MLP, a plain MLP, a sliding window."""

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False

# leftovers from training; `hidden_act` and `norm_epsilon` are used, and softmax is always in fp32
NO_EFFECT = (
    *("mlp_type", "norm_type", "activation_function", "layer_norm_epsilon", "scale_attn_weights"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
)


def config(hf: HFConfig) -> DecoderConfig:
    norm = LayerNorm.Config(hf.hidden_size, hf.norm_epsilon)
    attn = llama_like.attention(hf, qkv_bias=hf.use_bias, out_bias=hf.use_bias, window=hf.sliding_window)
    mlp = MLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act, hf.use_bias)
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *llama_like.attention_rows(),
        *classic.into_mlp("model.layers.{l}.mlp.c_fc"),
        *classic.out_of_mlp("model.layers.{l}.mlp.c_proj"),
    ]
