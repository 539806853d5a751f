"""Decoders with layers of the gated delta rule, and attention in between."""

import torch
from torch import nn

from tests.families._case import FULL, GROUPED, SIZES, Case


def stir(model: nn.Module) -> None:
    """Taps of order one; decays that differ between heads, which transformers draws from the process's generator."""
    for name, parameter in model.named_parameters():
        if "conv" in name and parameter.ndim == 3:
            parameter.mul_(2.5)
        if name.endswith("A_log"):
            parameter.copy_(torch.linspace(-2.5, 0.5, parameter.numel()).view_as(parameter))
        if name.endswith("dt_bias"):
            parameter.copy_(torch.linspace(1.5, -2.5, len(parameter)))


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
}
MIXED = {**SIZES, **GROUPED, **LINEAR, "head_dim": 16, "num_hidden_layers": 4, "max_position_embeddings": 90}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
QWEN3_NEXT = {**MIXED, **EXPERTS}
QWEN3_5_MOE = {name: value for name, value in QWEN3_NEXT.items() if name != "intermediate_size"}
LARA = {**QWEN3_5_MOE, "num_hidden_layers": 3, "sliding_window": 5}
SHORT_LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}

# Values as wide as keys: transformers saves the convolutions of others in thirds of their sum (see test_delta_nets.py).
OLMO_HYBRID = {
    **SIZES,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 0.02,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 6,
}

# fmt: off
CASES: list[Case] = [
    Case("qwen3_next", "three-to-one", QWEN3_NEXT, n_prompt=70, adjust=stir),
    Case("qwen3_5_text", "biased-tied-positions-of-images", {**MIXED, **SHORT_LAYERS, "attention_bias": True,
         "tie_word_embeddings": True, "linear_num_key_heads": 4, "rope_parameters": {"rope_type": "default",
         "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
         adjust=stir),
    Case("qwen3_5_moe_text", "biased-tied", {**QWEN3_5_MOE, **SHORT_LAYERS, "attention_bias": True,
         "tie_word_embeddings": True}, adjust=stir),
    Case("lara_mini", "local-and-unturned", {**LARA, "layer_types": ["linear_attention", "sliding_attention",
         "full_attention"]}, adjust=stir),
    Case("lara_mini", "biased-untied-not-renormalised", {**LARA, **FULL, "num_hidden_layers": 2, "attention_bias": True,
         "layer_types": ["sliding_attention", "linear_attention"], "tie_word_embeddings": False,
         "norm_topk_prob": False}, adjust=stir),
    Case("olmo_hybrid", "three-to-one-reflected", OLMO_HYBRID, adjust=stir),
    Case("olmo_hybrid", "biased-attention-first-rotary-tied", {**OLMO_HYBRID, **SHORT_LAYERS, "attention_bias": True,
         "tie_word_embeddings": True, "linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3,
         "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, adjust=stir),
]
# fmt: on
