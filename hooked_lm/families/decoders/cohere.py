"""Command R (Cohere 2024, docs.cohere.com/docs/command-r): attention and MLP in parallel after one norm, rotary in
adjacent pairs, scaled logits; the larger models have separate query and key norms for each head."""

from typing import Any

from hooked_lm.components.blocks.parallel import SharedNormBlock
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "block", "config", "norm", "rows"]

NO_EFFECT = ("model_max_length",)  # used by the tokenizer


def config(hf: HFConfig) -> DecoderConfig:
    d_head = llama_like.head_dim(hf)
    q_norm = LayerNorm.Config(d_head, hf.layer_norm_eps, bias=False, n_heads=hf.num_attention_heads)
    k_norm = LayerNorm.Config(d_head, hf.layer_norm_eps, bias=False, n_heads=hf.num_key_value_heads)
    norms = {"qk_norm": q_norm, "k_norm": k_norm} if hf.use_qk_norm else {}
    layer = block(hf, **norms)
    return llama_like.around(hf, [layer] * hf.num_hidden_layers, layer.ln1, logit_scale=hf.logit_scale)


def block(hf: HFConfig, **options: Any) -> SharedNormBlock.Config:
    """A layer; `options` are those of its attention."""
    d_head = llama_like.head_dim(hf)
    if "rotary" not in options:
        options["rotary"] = rotary(hf, d_head, adjacent_pairs=True)
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias, **options)
    return SharedNormBlock.Config(attn=attn, ln1=norm(hf), mlp=llama_like.gated_mlp(hf))


def norm(hf: HFConfig) -> LayerNorm.Config:
    """A norm of the residual stream."""
    return LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps, bias=False)
