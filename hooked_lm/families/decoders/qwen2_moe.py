"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671): small experts, and a gated shared expert."""

from dataclasses import replace

from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.router import SoftmaxRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False

# the last two repeat `layer_types` and `sliding_window`
NO_EFFECT = (*moe.NO_EFFECT, "use_sliding_window", "max_window_layers")


def config(hf: HFConfig) -> DecoderConfig:
    experts = moe.experts(hf, hf.num_experts, SoftmaxRouter(hf.norm_topk_prob), hf.moe_intermediate_size)
    shared = GatedMLP.Config(hf.hidden_size, hf.shared_expert_intermediate_size, hf.hidden_act)
    experts = replace(experts, shared=shared, shared_gate=True)
    attns = llama_like.by_window(hf, llama_like.attention(hf, qkv_bias=hf.qkv_bias))
    return moe.decoder(hf, attns, moe.some_sparse(hf, experts, moe.every_nth(hf)))


def rows(tree: DecoderConfig) -> list[Row]:
    gate = Row("model.layers.{l}.mlp.shared_expert_gate.weight", "blocks.{l}.mlp.W_shared_gate", "g m -> m g")
    return [*llama_like.rows(tree), *moe.sparse_rows(tree, shared="shared_expert"), gate]
