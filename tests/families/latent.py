"""Latent attention: with and without a latent of the queries, dense layers first, groups of experts."""

from typing import Any

from tests.families._case import SIZES, Case, rope
from tests.families.moe import corrected

DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 4,
    "topk_group": 2,
    "rms_norm_eps": 0.02,
    "routed_scaling_factor": 1.5,
}
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=10, mscale=0.8, mscale_all_dim=0.5)

DENSE = {
    name: value
    for name, value in DEEPSEEK.items()
    if not any(word in name for word in ("expert", "moe", "rout", "group"))
}
DENSE.pop("first_k_dense_replace")
MINICPM = {**DENSE, "scale_emb": 3.0, "scale_depth": 0.9, "dim_model_base": 20}

MISTRAL = {**DEEPSEEK, "num_key_value_heads": None}


# `Mistral4RotaryEmbedding.compute_default_rope_parameters` (modeling_mistral4.py) rotates whole heads: "default" does not run.
def late(kind: str, length: int, beta: float, **parameters: float) -> dict[str, Any]:
    """A rotary embedding, and a factor of queries that grows every `length` positions."""
    return rope(kind, original_max_position_embeddings=length, llama_4_scaling_beta=beta, **parameters)


# fmt: off
CASES = [
    Case("deepseek_v2", "greedy", {**DEEPSEEK, "rope_theta": 100.0}),
    Case("deepseek_v2", "groups-no-query-latent-yarn", {**DEEPSEEK, **YARN, "q_lora_rank": None,
         "topk_method": "group_limited_greedy", "n_shared_experts": 1}),
    Case("deepseek_v3", "groups", {**DEEPSEEK, "rope_theta": 100.0}, adjust=corrected),
    Case("deepseek_v3", "no-query-latent-yarn", {**DEEPSEEK, **YARN, "q_lora_rank": None, "n_group": 1,
         "topk_group": 1}, adjust=corrected),
    Case("youtu", "halves-no-query-latent-yarn", {**DENSE, **YARN, "q_lora_rank": None, "rope_interleave": False}),
    Case("minicpm3", "no-query-latent-yarn", {**MINICPM, **YARN, "q_lora_rank": None, "v_head_dim": None}),
    Case("mistral4", "groups", {**MISTRAL, **late("yarn", 4, 0.8, factor=10.0)}, auto="AutoModelForImageTextToText"),
    Case("mistral4", "yarn-no-query-latent-halves-not-renormalised", {**MISTRAL, **late("yarn", 10, 0.6, factor=4.0,
         mscale=0.8, mscale_all_dim=0.5, max_position_embeddings=40), "q_lora_rank": None, "rope_interleave": False,
         "norm_topk_prob": False}, auto="AutoModelForImageTextToText"),
    Case("mistral4", "biased-tied-one-group", {**MISTRAL, **late("linear", 3, 1.1, factor=2.0), "attention_bias": True,
         "tie_word_embeddings": True, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "v_head_dim": 8},
         auto="AutoModelForImageTextToText"),
]
# fmt: on
