"""BitNet b1.58 (Ma et al. 2025, arXiv:2504.12285): norms before the output projections of attention and MLP.

For full-precision weights without `quantization_config`: nothing is rounded.
"""

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    quantized = hf.get("quantization_config")
    if quantized is not None:
        raise ValueError(f"a BitNet that rounds its weights and activations is not supported: {quantized}")
    n_heads, d_mlp, norm = hf.num_attention_heads, hf.intermediate_size, llama_like.rms_norm(hf)
    attn = llama_like.attention(
        hf,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        z_norm=RMSNorm.Config(hf.hidden_size // n_heads, hf.rms_norm_eps, n_heads=n_heads, joint=True),
    )
    mlp = GatedMLP.Config(hf.hidden_size, d_mlp, hf.hidden_act, mid_norm=RMSNorm.Config(d_mlp, hf.rms_norm_eps))
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.", "blocks.{l}."
    return [
        *llama_like.rows(tree),
        Row(source + "self_attn.attn_sub_norm.weight", target + "attn.z_norm.w", "(n h) -> n h"),
        Row(source + "mlp.ffn_sub_norm.weight", target + "mlp.ln.w"),
    ]
