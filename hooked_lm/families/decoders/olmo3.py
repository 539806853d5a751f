"""OLMo 3 (OLMo Team 2025, arXiv:2512.13961): OLMo 2 with local layers, whose rotary embedding is not scaled."""

from dataclasses import replace

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx, rotary
from hooked_lm.families.decoders import olmo2
from hooked_lm.families.decoders.olmo2 import rows
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    d_head = llama_like.head_dim(hf)
    blocks = [
        olmo2.block(hf, window=window, rotary=rotary(hf, d_head, layer_type))
        for window, layer_type in zip(llama_like.windows(hf), hf.layer_types, strict=False)
    ]
    return replace(llama_like.around(hf, blocks, llama_like.rms_norm(hf)), n_ctx=n_ctx(hf, "full_attention"))
