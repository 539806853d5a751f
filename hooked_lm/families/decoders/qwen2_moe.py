"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671): small experts, and a gated shared expert."""

from dataclasses import replace

from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.components.mlp import GatedMLP
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
    attns = llama_like.by_window(hf, llama_like.attention(hf, qkv_bias=hf.qkv_bias))
    experts = gated_experts(hf, hf.norm_topk_prob)
    return moe.decoder(hf, attns, moe.some_sparse(hf, experts, moe.every_nth(hf)))


def gated_experts(hf: HFConfig, renormalize: bool) -> MoE.Config:
    """The mixture of a sparse layer, with a gated shared expert."""
    experts = moe.experts(hf, hf.num_experts, SoftmaxRouter(renormalize), hf.moe_intermediate_size)
    shared = GatedMLP.Config(hf.hidden_size, hf.shared_expert_intermediate_size, hf.hidden_act)
    return replace(experts, shared=shared, shared_gate=True)


def rows(tree: DecoderConfig) -> list[Row]:
    return [*llama_like.rows(tree), *sparse_rows(tree)]


def sparse_rows(tree: DecoderConfig) -> list[Row]:
    """Rows of a mixture."""
    gate = Row("model.layers.{l}.mlp.shared_expert_gate.weight", "blocks.{l}.mlp.W_shared_gate", "g m -> m g")
    return [*moe.sparse_rows(tree, shared="shared_expert"), gate]
