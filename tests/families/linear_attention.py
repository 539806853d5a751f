"""Decoders with Kimi Delta Attention or lightning attention, and softmax attention in between."""

from torch import nn

from tests.families._case import FULL, LINEAR, SIZES, Case
from tests.families.delta_nets import stir
from tests.families.latent import YARN
from tests.families.moe import corrected


def adjust(model: nn.Module) -> None:
    """Decays that differ between heads, and a choice of experts that differs from their scores."""
    stir(model)
    corrected(model)


ATTENDS_FIRST = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
KIMI = {
    **SIZES,
    "num_hidden_layers": 4,
    "max_position_embeddings": 90,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_key_value_heads": 4,
    "linear_num_heads": 3,
    "linear_head_dim": 6,
    "rms_norm_eps": 0.02,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
LING = {
    **{name: value for name, value in KIMI.items() if not name.startswith(("linear", "layer"))},
    "num_hidden_layers": 3,
    "head_dim": 6,
    "layer_group_size": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# 70 tokens are three blocks of transformers; the slopes of the last layer are almost zero
MINIMAX = {
    **SIZES,
    **FULL,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "max_position_embeddings": 90,
    "block_size": 24,
}
WEIGHTS = {
    "full_attn_alpha_factor": 1.7,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 0.6,
    "linear_attn_beta_factor": 1.3,
    "mlp_alpha_factor": 2.5,
    "mlp_beta_factor": 0.7,
}

# fmt: off
CASES: list[Case] = [
    Case("kimi_linear", "three-to-one", KIMI, n_prompt=70, adjust=adjust),
    Case("bailing_hybrid", "two-to-one-bounded", LING, n_prompt=70, adjust=adjust),
    Case("bailing_hybrid", "biased-attention-first-unbounded-yarn", {**LING, **ATTENDS_FIRST, **YARN,
         "attention_bias": True, "kda_safe_gate": False, "num_expert_group": 1, "topk_group": 1,
         "norm_topk_prob": False, "short_conv_kernel_size": 3, "first_k_dense_replace": 0}, adjust=adjust),
    Case("bailing_hybrid", "dense-gelu-narrow-bound-wide-values", {**LING, **ATTENDS_FIRST, "first_k_dense_replace": 2,
         "hidden_act": "gelu", "kda_lower_bound": -0.7, "rope_theta": 100.0, "head_dim": 8, "v_head_dim": 10,
         "rms_norm_eps": 0.05}, adjust=adjust),
    Case("minimax", "one-to-one-weighted", MINIMAX | WEIGHTS, n_prompt=70),
    Case("minimax", "one-expert-each-of-three-gelu-linear-rotary", {**MINIMAX, **LINEAR, "num_experts_per_tok": 1,
         "num_local_experts": 3, "hidden_act": "gelu", "num_hidden_layers": 3}),
]
# fmt: on
