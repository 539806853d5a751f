"""ERNIE 4.5 without experts (Baidu 2025, "ERNIE 4.5 Technical Report"): LLaMA with adjacent rotary pairs."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]

PREPENDS_BOS = False


def config(hf: HFConfig) -> DecoderConfig:
    turn = rotary(hf, hf.head_dim, adjacent_pairs=True)
    attn = llama_like.attention(hf, rotary=turn, qkv_bias=hf.use_bias, out_bias=hf.use_bias)
    return llama_like.decoder(hf, attn, mlp_bias=hf.use_bias)
