"""Hunyuan-A13B (Tencent 2025, huggingface.co/tencent/Hunyuan-A13B-Instruct): Hunyuan's attention; experts of full width, and
a shared one of the same width."""

from dataclasses import replace

from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import hunyuan_v1_dense
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# the additional fields are for training
NO_EFFECT = (*hunyuan_v1_dense.NO_EFFECT, *moe.NO_EFFECT, "use_mixed_mlp_moe", "capacity_factor")


def config(hf: HFConfig) -> DecoderConfig:
    hf.ignored_by_transformers(num_shared_expert=1, moe_intermediate_size=hf.intermediate_size)
    tree, mlp, top_k = hunyuan_v1_dense.config(hf), llama_like.gated_mlp(hf), hf.moe_topk
    chosen = top_k if isinstance(top_k, list) else [top_k] * len(tree.blocks)
    experts = [MoE.Config(mlp, hf.num_experts, k, SoftmaxRouter(renormalize=True), shared=mlp) for k in chosen]
    blocks = [replace(block, mlp=mixture) for block, mixture in zip(tree.blocks, experts, strict=False)]
    return replace(tree, blocks=tuple(blocks))


def rows(tree: DecoderConfig) -> list[Row]:
    return [*hunyuan_v1_dense.rows(tree), *moe.sparse_rows(tree, shared="shared_mlp", router="gate.wg")]
