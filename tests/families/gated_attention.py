"""Decoders with gated attention and experts, and those with other routers by sigmoids."""

from typing import Any

from tests.families._case import FULL, GROUPED, SIZES, Case
from tests.families.composites import embed_padding
from tests.families.moe import corrected

HYBRID = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
KOLIBRI = {name: value for name, value in HYBRID.items() if name != "intermediate_size"}


def by_type(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """A rotary embedding for each type of layers."""
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 300.0, **full},
            "sliding_attention": {"rope_type": "default", "rope_theta": 40.0, **sliding},
        }
    }


def corrected_and_padded(model: Any) -> None:
    """Corrections that matter, and a gradient of the embedding of padding, which Step 3.7 has to have."""
    corrected(model)
    embed_padding(model)


LAGUNA = {**HYBRID, "shared_expert_intermediate_size": 28, **by_type({"partial_rotary_factor": 0.5}, {})}
LAGUNA |= {"num_attention_heads_per_layer": [4, 6, 4], "moe_router_logit_softcapping": 0.7}
STEP = {
    **SIZES,
    "pad_token_id": 0,
    **GROUPED,
    **by_type({"partial_rotary_factor": 0.5}, {}),
    "num_hidden_layers": 3,
    "head_dim": 8,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "num_sliding_attention_heads": 6,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "share_expert_dim": 28,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "swiglu_limits": [0.0, None, 0.6],
    "swiglu_limits_shared": [0.3, 0.0, 0.4],
}

# fmt: off
CASES: list[Case] = [
    Case("afmoe", "hybrid", HYBRID, adjust=corrected),
    Case("afmoe", "biased-scaled-embedding-two-dense-tied", {**HYBRID, **FULL, "attention_bias": True,
         "mup_enabled": True, "num_dense_layers": 2, "num_shared_experts": 1, "tie_word_embeddings": True,
         "route_scale": 1.5, "hidden_size": 16}, adjust=corrected),
    Case("laguna", "heads-by-layer-capped", LAGUNA, adjust=corrected),
    Case("laguna", "per-element-biased-scaled-tied", {**LAGUNA, **FULL, **by_type({}, {"partial_rotary_factor": 0.5}),
         "gating": "per-element", "num_attention_heads_per_layer": [8, 4, 4], "attention_bias": True,
         "moe_routed_scaling_factor": 1.7, "moe_router_logit_softcapping": 0.0, "tie_word_embeddings": True,
         "mlp_layer_types": ["sparse", "dense", "sparse"]}, adjust=corrected),
    Case("flint", "hybrid", {**HYBRID, "shared_expert_intermediate_size": 28, "mlp_only_layers": [0]}),
    Case("flint", "biased-not-renormalised-every-second-tied", {**HYBRID, **FULL, "attention_bias": True,
         "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [], "tie_word_embeddings": True,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    Case("kolibri1", "hybrid", {**KOLIBRI, "shared_expert_intermediate_size": 28}, adjust=corrected),
    Case("step3p5", "more-local-heads-bounded", STEP, composite="step3p7", adjust=corrected_and_padded),
    Case("step3p5", "biased-scaled-unbounded", {**STEP, **FULL, **by_type({}, {"partial_rotary_factor": 0.5}),
         "num_sliding_attention_heads": 4, "attention_bias": True, "mlp_bias": True, "moe_router_scaling_factor": 1.7,
         "swiglu_limits": None, "swiglu_limits_shared": None, "query_pre_attn_scalar": 20, "mlp_layer_types": ["sparse",
         "sparse", "dense"], "num_experts_per_tok": 3}, composite="step3p7", adjust=corrected_and_padded),
]
# fmt: on
