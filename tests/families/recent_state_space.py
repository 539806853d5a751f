"""Decoders with state-space mixers or short convolutions, beside those of `state_space.py`."""

import torch
from torch import nn

from tests.families._case import GROUPED, LINEAR, LLAMA3, SIZES, Case
from tests.families.state_space import MAMBA, stir


def bias_choice(model: nn.Module) -> None:
    """As `stir`; corrections that choose other experts than the scores do."""
    stir(model)
    for name, buffer in model.named_buffers():
        if name.endswith(("expert_bias", "e_score_correction_bias")):
            buffer.copy_(torch.linspace(0.3, -0.3, len(buffer)))


def short_steps(model: nn.Module) -> None:
    """As `stir`, with smaller steps, which enlarge rounding less."""
    stir(model)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_proj.bias"):
            parameter.copy_(torch.linspace(-3.5, -0.5, len(parameter)))


def stir_heads(model: nn.Module) -> None:
    """As `short_steps`, for Mamba with heads, whose steps and decays have an axis of heads."""
    stir(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("dt_proj_bias", "dt_bias")):
            parameter.copy_(torch.linspace(-3.5, -0.5, parameter.numel()).view_as(parameter))
        if name.endswith("A_log") and parameter.ndim == 3:
            parameter.copy_(torch.arange(1.0, parameter.shape[-1] + 1).log().expand_as(parameter))
        if name.endswith("q_proj.weight"):  # scores and products that enlarge rounding less
            parameter.mul_(0.7)
        if "feed_forward" in name:
            parameter.mul_(0.6)


FALCON_MAMBA = {**MAMBA, "mixer_rms_eps": 0.03}
JAMBA = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 5,
    "mamba_d_state": 5,
}
LFM2 = {
    **SIZES,
    "num_key_value_heads": 2,
    "norm_eps": 0.02,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 8,
}
LFM2_MOE = {
    **{name: value for name, value in LFM2.items() if name != "block_multiple_of"},
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
}
LFM3 = {
    **SIZES,
    "num_key_value_heads": 2,
    "norm_eps": 0.02,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    "sliding_window": 5,
    "conv_L_cache": 4,
}
FALCON_H1 = {
    **SIZES,
    **GROUPED,
    "mamba_d_ssm": 40,
    "mamba_n_heads": 8,
    "mamba_d_state": 5,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [1.4, 0.7],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.2,
    "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.6],
}
ZAMBA = {
    **SIZES,
    **GROUPED,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "num_hidden_layers": 4,
    "mamba_d_state": 5,
    "mamba_dt_rank": 3,
    "rms_norm_eps": 1.0,
}
ZAMBA2 = {
    **SIZES,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 5,
    "mamba_d_state": 5,
    "mamba_ngroups": 2,
    "chunk_size": 16,
    "adapter_rank": 3,
    "rms_norm_eps": 1.0,
}
NEMOTRON_H = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_norm_epsilon": 0.02,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 5,
    "chunk_size": 16,
    "n_routed_experts": 5,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
}
del NEMOTRON_H["num_hidden_layers"]

# fmt: off
CASES: list[Case] = [
    Case("falcon_mamba", "tied", FALCON_MAMBA, adjust=stir),
    # norms of eps 0.02 enlarge the rounding of transformers to two thirds of what may differ, these to an eighth
    Case("jamba", "sparse-every-other-layer", {**JAMBA, "rms_norm_eps": 1.0}, adjust=short_steps),
    Case("jamba", "attention-first-one-expert-each-gelu", {**JAMBA, "attn_layer_offset": 0, "expert_layer_period": 3,
         "expert_layer_offset": 2, "num_experts_per_tok": 1, "hidden_act": "gelu", "mamba_d_conv": 3}, adjust=stir),
    Case("lfm2", "convolutions-around-attention", LFM2, adjust=stir),
    Case("lfm2", "biased-untied-wide-scaled-rotary", {**LFM2, **LLAMA3, "conv_bias": True, "tie_word_embeddings": False,
         "conv_L_cache": 5, "block_ffn_dim_multiplier": 1.7}, adjust=stir),
    Case("lfm2", "layers-by-index-two-taps", {**{name: value for name, value in LFM2.items() if name != "layer_types"},
         "full_attn_idxs": [0], "conv_L_cache": 2, "block_auto_adjust_ff_dim": False, "num_key_value_heads": 4},
         adjust=stir),
    Case("lfm2_moe", "one-dense-layer", LFM2_MOE, adjust=bias_choice),
    Case("lfm2_moe", "no-correction-not-renormalised-scaled", {**LFM2_MOE, "use_expert_bias": False,
         "norm_topk_prob": False, "routed_scaling_factor": 1.6}, adjust=stir),
    Case("lfm3", "gated-sandwiched", LFM3, adjust=stir),
    Case("lfm3", "no-gate-no-sandwich-biased-untied", {**LFM3, "use_attention_gate": False, "use_sandwich_norm": False,
         "conv_bias": True, "attention_bias": True, "tie_word_embeddings": False}, adjust=stir),
    Case("falcon_h1", "without-norm-of-mixers", FALCON_H1, adjust=stir),
    Case("falcon_h1", "biased-tied-normed-before-gate", {**FALCON_H1, **dict.fromkeys(("attention_in_multiplier",
         "ssm_in_multiplier"), 1.0), **dict.fromkeys(("attention_bias", "mamba_proj_bias", "projectors_bias",
         "mlp_bias"), True), "mamba_rms_norm": True, "tie_word_embeddings": True, "mamba_conv_bias": False},
         adjust=stir),
    Case("falcon_h1", "normed-after-gate-gelu-limited-steps", {**FALCON_H1, **LLAMA3, "mamba_rms_norm": True,
         "mamba_norm_before_gate": False, "mamba_d_ssm": None, "mamba_n_groups": 1, "mamba_d_conv": 3,
         "hidden_act": "gelu", "projectors_bias": True, "time_step_limit": [0.2, 1.1]}, adjust=stir),
    Case("nemotron_h", "experts-biased-published-pattern", {**{name: value for name,
         value in NEMOTRON_H.items() if name != "layers_block_type"}, "hybrid_override_pattern": "ME*E",
         "use_bias": True, "mlp_bias": True, "use_conv_bias": False, "routed_scaling_factor": 1.5}, adjust=bias_choice),
    Case("nemotron_h", "all-kinds-grouped-experts-gelu-least-step", {**NEMOTRON_H, "layers_block_type": ["mlp",
         "full_attention", "linear_attention", "linear_attention", "moe"], "n_routed_experts": 8, "n_group": 4,
         "topk_group": 2, "norm_topk_prob": False, "mlp_hidden_act": "gelu", "n_groups": 8, "time_step_min": 0.3,
         "conv_kernel": 3}, adjust=bias_choice),
    Case("zamba", "two-applications", ZAMBA, adjust=stir_heads),
    Case("zamba", "biased-untied-one-head-of-mamba-applied-first", {**ZAMBA, "layers_block_type": ["hybrid",
         "linear_attention", "hybrid", "linear_attention"], "n_mamba_heads": 1, "mamba_expand": 1,
         "mamba_proj_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 4},
         adjust=stir_heads),
    Case("zamba", "four-heads-of-mamba-silu-three-taps-three-applications", {**ZAMBA,
         "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"], "n_mamba_heads": 4, "mamba_d_conv": 3,
         "hidden_act": "silu", "hidden_mamba_act": "gelu"}, adjust=stir_heads),
    Case("zamba2", "two-sets-in-turn-adapted-attention-rotary", {**ZAMBA2, **LINEAR, "num_mem_blocks": 2,
         "use_shared_attention_adapter": True, "use_mem_rope": True, "mamba_ngroups": 4, "mamba_d_conv": 3},
         adjust=stir_heads),
    Case("zamba2", "biased-silu-narrow-least-step", {**ZAMBA2, "layers_block_type": ["hybrid", "linear_attention",
         "hybrid"], "num_hidden_layers": 3, "add_bias_linear": True, "hidden_act": "silu", "mamba_expand": 1,
         "mamba_ngroups": 1, "num_key_value_heads": 2, "time_step_min": 0.3}, adjust=stir_heads),
]
# fmt: on
