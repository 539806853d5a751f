"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv:2405.04434): latent attention, experts in groups."""

from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import GroupedSoftmaxRouter
from hooked_lm.families._shared import deepseek, moe
from hooked_lm.families._shared.deepseek import rows
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = (*deepseek.NO_EFFECT, "norm_topk_prob")  # the published code never renormalises


def config(hf: HFConfig) -> DecoderConfig:
    mlps = moe.some_sparse(hf, experts(hf), moe.from_layer(hf.first_k_dense_replace), hf.mlp_bias)
    return moe.decoder(hf, deepseek.attention(hf, adjacent_pairs=True), mlps)


def experts(hf: HFConfig) -> MoE.Config:
    """The mixture of a sparse layer."""
    groups = {"greedy": (1, 1), "group_limited_greedy": (hf.n_group, hf.topk_group)}
    if hf.topk_method not in groups:
        raise ValueError(f"topk_method {hf.topk_method!r} is not supported; {' and '.join(groups)} are")
    if None in groups[hf.topk_method]:
        raise ValueError(
            f"topk_method {hf.topk_method!r} needs n_group and topk_group, which are {hf.n_group}, {hf.topk_group}"
        )
    router = GroupedSoftmaxRouter(*groups[hf.topk_method], hf.routed_scaling_factor)
    return moe.experts(
        hf, hf.n_routed_experts, router, hf.moe_intermediate_size, hf.n_shared_experts, shared_bias=hf.mlp_bias
    )
