"""FlexOlmo (Shi et al. 2025, arXiv:2507.07024): OLMo 2 with OLMoE's experts instead of MLPs."""

from dataclasses import replace

from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import olmo2
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = moe.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    experts = moe.experts(hf, hf.num_experts, SoftmaxRouter(hf.norm_topk_prob))
    block = replace(olmo2.block(hf), mlp=experts)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, llama_like.rms_norm(hf))


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.outer_rows(tree),
        *llama_like.post_norm_rows(),
        *olmo2.attention_rows(),
        *moe.sparse_rows(tree),
    ]
