"""The language model of DeepSeek-OCR 2 (DeepSeek-AI 2026): Llama's attention, and DeepSeek-V2's experts."""

from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.moe import rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import deepseek_v2
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = moe.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias)
    # without a list all layers are sparse, as in DeepSeek-V2; transformers (modeling_deepseek_ocr2.py) cannot build such a model
    hf = hf.changed(mlp_layer_types=hf.mlp_layer_types or ["sparse"] * hf.num_hidden_layers)
    mlps = moe.some_sparse(hf, deepseek_v2.experts(hf), moe.of_sparse_type(hf), hf.mlp_bias)
    return moe.decoder(hf, attn, mlps)
