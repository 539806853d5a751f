"""LFM2-8B-A1B (Liquid AI 2025, arXiv:2511.23404): LFM2 with experts in all but the first layers."""

from dataclasses import replace

from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import lfm2
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = (*moe.NO_EFFECT, *lfm2.NO_EFFECT)


def config(hf: HFConfig) -> DecoderConfig:
    dense = GatedMLP.Config(hf.hidden_size, hf.intermediate_size, "silu")
    router = GroupedSigmoidRouter(
        renormalize=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
        corrected=hf.use_expert_bias,
        in_fp32=False,
        eps=1e-6,
    )
    expert = replace(dense, d_mlp=hf.moe_intermediate_size)
    sparse = MoE.Config(expert, hf.num_experts, hf.num_experts_per_tok, router)
    mlps = [dense if layer < hf.num_dense_layers else sparse for layer in range(hf.num_hidden_layers)]
    return llama_like.around(hf, lfm2.blocks(hf, mlps), RMSNorm.Config(hf.hidden_size, hf.norm_eps))


def rows(tree: DecoderConfig) -> list[Row]:
    sparse = moe.sparse_rows(tree, "feed_forward", ("w1", "w3", "w2"), correction="expert_bias")
    return [*lfm2.rows(tree), *sparse]
