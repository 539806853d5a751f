"""Command A+ (Cohere 2026, huggingface.co/CohereLabs/command-a-plus-05-2026): Cohere 2 with experts, whose mean with a shared MLP
is the output."""

from dataclasses import replace

from hooked_lm.components.experts.router import GroupedSigmoidRouter, Router, TopKRouter
from hooked_lm.components.norms.norm import NormConfig
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.moe import rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import cohere, cohere2
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# the last two repeat `rope_parameters`
NO_EFFECT = (*cohere2.NO_EFFECT, *moe.NO_EFFECT, "first_k_dense_replace", "rope_theta", "rope_scaling")


def config(hf: HFConfig) -> DecoderConfig:
    mlps, pattern = _mlps(hf), hf.prefix_dense_sliding_window_pattern
    blocks, norm = [], _norm(hf)
    for window, mlp, kind in zip(llama_like.windows(hf), mlps, hf.mlp_layer_types, strict=False):
        is_turned = window is not None or (kind == "dense" and pattern == 1)
        block = cohere.block(hf, window=window) if is_turned else cohere.block(hf, rotary=None)
        blocks.append(replace(block, ln1=norm, mlp=mlp))
    return llama_like.around(hf, blocks, norm, logit_scale=hf.logit_scale)


def _norm(hf: HFConfig) -> NormConfig:
    return cohere.norm(hf) if hf.rms_norm_eps is None else llama_like.rms_norm(hf)


def _mlps(hf: HFConfig) -> list[moe.MLPConfig]:
    """The MLP of each layer."""
    routers: dict[str, Router] = {
        "softmax": TopKRouter(),
        "sigmoid": GroupedSigmoidRouter(renormalize=hf.norm_topk_prob, corrected=False),
    }
    scales = {"average": 0.5, "sum": 1.0}
    chosen, combined = hf.expert_selection_fn, hf.shared_expert_combination_strategy
    if chosen not in routers or combined not in scales:
        raise ValueError(
            f"expert_selection_fn={chosen!r}, shared_expert_combination_strategy={combined!r}: supported are "
            f"{' and '.join(routers)}, {' and '.join(scales)}"
        )
    experts = moe.experts(hf, hf.num_experts, routers[chosen], n_shared=hf.num_shared_experts)
    if experts.shared is not None:
        experts = replace(experts, out_scale=scales[combined])
    dense = replace(llama_like.gated_mlp(hf), d_mlp=hf.prefix_dense_intermediate_size or hf.intermediate_size)
    is_sparse = moe.of_sparse_type(hf)
    return [experts if is_sparse(layer) else dense for layer in range(hf.num_hidden_layers)]
