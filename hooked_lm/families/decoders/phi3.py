"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219) and Phi-4: fused projections, partial rotary, long-context factors."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# both are repeated in `rope_parameters`
NO_EFFECT = ("original_max_position_embeddings", "partial_rotary_factor")


def config(hf: HFConfig) -> DecoderConfig:
    return llama_like.decoder(hf, llama_like.attention(hf, partial=True, window=hf.sliding_window))


def rows(tree: DecoderConfig) -> list[Row]:
    attn = tree.blocks[0].attn
    heads = {"Q": attn.n_heads, "K": attn.n_kv, "V": attn.n_kv}
    source, target = "model.layers.{l}.", "blocks.{l}."
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        Row(source + "self_attn.qkv_proj.weight", target + "attn.W_{x}", "(x h) m -> x m h", x=heads),
        Row(source + "self_attn.o_proj.weight", target + "attn.W_O", "m (n h) -> n h m"),
        *llama_like.fused_mlp_rows(),
    ]
