"""Decoders whose attention scales queries by position, attends within chunks, or has values of another width."""

from tests.families._case import FULL, GROUPED, LLAMA3, SIZES, Case, rope
from tests.families.moe import corrected

TIED = {"tie_word_embeddings": True}
WIDE = {**SIZES, **GROUPED, "head_dim": 16}


def steep(length: int, beta: float, kind: str = "yarn", **parameters: float) -> dict:
    """A rotary embedding with a factor of queries that grows every `length` positions."""
    return rope(
        kind,
        original_max_position_embeddings=length,
        llama_4_scaling_beta=beta,
        max_position_embeddings=SIZES["max_position_embeddings"],
        **parameters,
    )


LLAMA4 = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_chunk_size": 5,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 3,
    "attn_scale": 0.7,
    **rope("default"),
}
MIMO = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}


def by_type(full: dict, local: dict) -> dict:
    """Rotary embeddings of full and of local layers."""
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


# fmt: off
CASES: list[Case] = [
    Case("ministral3", "yarn-steep", {**SIZES, **GROUPED, "head_dim": 8, **steep(3, 0.9, factor=4.0, beta_fast=8.0)}),
    Case("ministral3", "wide-tied-window-default", {**WIDE, **TIED, **steep(5, 0.5, "default"), "sliding_window": 6}),
    Case("llama4_text", "chunks-first-second-unturned", LLAMA4),
    Case("llama4_text", "no-qk-norm-biased-every-other-sparse-llama3", {**LLAMA4, **LLAMA3, **FULL,
         "use_qk_norm": False, "attention_bias": True, "interleave_moe_layer_step": 2, "head_dim": 16,
         "num_experts_per_tok": 1}),
    Case("llama4_text", "no-temperature-tied-chunks-without-rotary", {**LLAMA4, **TIED,
         "attn_temperature_tuning": False, "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
         "moe_layers": [1], "num_experts_per_tok": 3, "hidden_act": "gelu"}),
    Case("llama4_text", "temperature-in-chunks", {**LLAMA4, "layer_types": ["chunked_attention"] * 3, "moe_layers": [],
         "attention_chunk_size": 7}),
    Case("mimo_v2_flash", "narrow-values", MIMO, adjust=corrected),
    Case("mimo_v2_flash", "biased-wide-values-groups-all-sparse", {**MIMO, **by_type({"rope_type": "default",
         "rope_theta": 100.0, "partial_rotary_factor": 0.5}, {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0,
         "partial_rotary_factor": 1.0}), "attention_bias": True, "num_key_value_heads": 2, "head_dim": 8,
         "v_head_dim": 12, "attention_value_scale": 1.6, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
         "norm_topk_prob": False, "mlp_layer_types": ["sparse", "sparse", "sparse"]}, adjust=corrected),
    Case("mimo_v2_flash", "no-value-scale-tied-local-first-dense", {**MIMO, **TIED, "attention_value_scale": None,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "mlp_layer_types": ["dense",
         "sparse", "dense"]}, adjust=corrected),
]
# fmt: on
