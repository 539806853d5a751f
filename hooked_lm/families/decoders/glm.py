"""GLM-4 of 2024 (GLM Team, arXiv:2406.12793): adjacent rotary pairs in half of each head, fused gate and input projections."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = ("partial_rotary_factor",)  # repeated in `rope_parameters`


def config(hf: HFConfig) -> DecoderConfig:
    d_head = hf.head_dim or hf.hidden_size // hf.num_attention_heads
    attn = llama_like.attention(
        hf, rotary=rotary(hf, d_head, adjacent_pairs=True, partial=True), qkv_bias=hf.attention_bias
    )
    return llama_like.decoder(hf, attn)


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *llama_like.attention_rows(),
        *llama_like.fused_mlp_rows(),
    ]
