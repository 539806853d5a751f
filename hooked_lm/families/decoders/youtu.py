"""Youtu-LLM (Tencent 2025, arXiv:2512.24618): DeepSeek-V3's latent attention, with dense MLPs in all layers."""

from hooked_lm.families._shared import deepseek, llama_like
from hooked_lm.families._shared.deepseek import rows
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = (*deepseek.NO_EFFECT, "embedding_initializer_range")


def config(hf: HFConfig) -> DecoderConfig:
    hf.require(head_dim=hf.qk_rope_head_dim)  # only the rotary embedding of transformers reads it
    block, norm = deepseek.dense_block(hf, hf.rope_interleave), llama_like.rms_norm(hf)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm)
