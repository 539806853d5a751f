"""OLMo 3 (OLMo Team 2025): OLMo 2 with three of four layers local; only the others stretch their rotary embedding."""

from hooked_lm.families import _llama_like as llama_like
from hooked_lm.families import _olmo2 as olmo2
from hooked_lm.families._llama_like import IGNORED, PREFIX
from hooked_lm.families._olmo2 import rows
from hooked_lm.families._reader import HFConfig
from hooked_lm.families._rotary import rotary
from hooked_lm.models.config import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("default_theta",)


def config(hf: HFConfig) -> DecoderConfig:
    d_head = hf.hidden_size // hf.num_attention_heads
    attns = [
        olmo2.attention(hf, rotary=rotary(hf, d_head, layer_type), window=window)
        for layer_type, window in zip(hf.layer_types, llama_like.windows(hf), strict=False)
    ]
    return llama_like.around(hf, [olmo2.block(hf, attn) for attn in attns], llama_like.rms_norm(hf))
