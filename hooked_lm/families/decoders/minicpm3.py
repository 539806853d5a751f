"""MiniCPM3 (OpenBMB 2024; Hu et al., arXiv:2404.06395): latent attention with dense MLPs, and multipliers of embedding, sublayer
outputs and logits that follow from width and depth."""

from dataclasses import replace

from hooked_lm.families._shared import deepseek, llama_like
from hooked_lm.families._shared.deepseek import rows
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = deepseek.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    residual_scale = hf.scale_depth / hf.num_hidden_layers**0.5
    block = replace(deepseek.dense_block(hf, False, hf.mlp_bias), residual_scale=residual_scale)
    blocks, norm = [block] * hf.num_hidden_layers, llama_like.rms_norm(hf)
    return llama_like.around(hf, blocks, norm, float(hf.scale_emb), logit_scale=hf.dim_model_base / hf.hidden_size)
