"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): Qwen3 with experts instead of MLPs, none of them shared."""

from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.moe import rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = (*moe.NO_EFFECT, "use_sliding_window", "max_window_layers")  # repeat `sliding_window`


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(
        hf,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=llama_like.head_norm(hf),
        window=hf.sliding_window,
    )
    experts = moe.experts(hf, hf.num_local_experts, SoftmaxRouter(hf.norm_topk_prob), hf.moe_intermediate_size)
    return moe.decoder(hf, attn, moe.some_sparse(hf, experts, moe.every_nth(hf)))
