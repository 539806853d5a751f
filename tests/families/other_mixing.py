"""Decoders that mix tokens in ways of their own: differences of patterns, experts in attention, other recurrences."""

import torch
from torch import nn

from tests.families._case import FULL, GROUPED, LINEAR, SIZES, Case


def stir_lambdas(model: nn.Module) -> None:
    """Weights of lambda that do not depend on the process's generator, from which transformers draws them."""
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if "lambda_" in name:
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


JETMOE = {
    **{name: value for name, value in SIZES.items() if name != "num_attention_heads"},
    "kv_channels": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 0.02,
}


def stir_decays(model: nn.Module) -> None:
    """Decays from almost none to almost all, bonuses of both signs."""
    for name, parameter in model.named_parameters():
        if name.endswith("time_decay"):
            parameter.copy_(torch.linspace(-4.0, 2.0, len(parameter)))
        if name.endswith("time_first"):
            parameter.copy_(torch.linspace(1.5, -1.5, len(parameter)))
        if "time_mix" in name:
            parameter.copy_(torch.linspace(-0.2, 1.1, parameter.numel()).view_as(parameter).roll(len(name), -1))


RWKV = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "layer_norm_epsilon": 0.02,
    "rescale_every": 0,  # see test_other_mixing.py
    "use_cache": False,  # RwkvSelfAttention writes into its state in place, through which no gradient passes
}


def stir_gates(model: nn.Module) -> None:
    """Gates of order one, which differ between heads."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate_preact.weight") and len(parameter) <= 4:
            parameter.mul_(0.4)
        if name.endswith("igate_preact.bias"):
            parameter.copy_(torch.linspace(-1.5, 1.0, len(parameter)))
        if name.endswith("fgate_preact.bias"):
            parameter.copy_(torch.linspace(3.0, 0.5, len(parameter)))


XLSTM = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "qk_dim_factor": 1.0,  # xLSTMCache of transformers rounds widths up to multiples of 64, other than the layers
    "norm_eps": 0.02,
    "use_cache": False,
}
REFUSED = {"xlstm": {"add_out_norm", "tie_word_embeddings"}}


def stir_biases(model: nn.Module) -> None:
    """Biases of keys that differ, and weights of the stream around one."""
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):
            parameter.copy_(torch.linspace(-1.0, 0.8, len(parameter)))
        if name.endswith("dt_proj.weight"):
            parameter.mul_(2)


def stir_routers(model: nn.Module) -> None:
    """Keys of uneven lengths, and routers that choose every expert, and none, for some tokens."""
    for name, parameter in model.named_parameters():
        if name.endswith("qk_norm.temp"):
            parameter.copy_(torch.linspace(1.5, 2.5, len(parameter)))
        if ".gate." in name:
            parameter.mul_(0.3 if name.endswith("bias") else 3 if parameter.ndim == 2 else 1)
        if "conv_qk" in name:
            parameter.mul_(2)
    for name, buffer in model.named_buffers():
        if name.endswith("balancing_biases"):
            buffer.copy_(torch.linspace(0.1, -0.1, len(buffer)))


ZAYA = {
    **{name: value for name, value in SIZES.items() if name != "intermediate_size"},
    **GROUPED,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 3,
    "router_hidden_size": 12,
    "rope_parameters": {"hybrid": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
}


# fmt: off
CASES: list[Case] = [
    Case("diffllama", "grouped", {**SIZES, **GROUPED}, adjust=stir_lambdas),
    Case("diffllama", "biased-tied-linear", {**SIZES, **FULL, **LINEAR, "attention_bias": True,
         "tie_word_embeddings": True}, adjust=stir_lambdas),
    Case("jetmoe", "two-of-four", JETMOE),
    Case("jetmoe", "three-of-four-linear-one-head-each", {**JETMOE, **LINEAR, "num_experts_per_tok": 3,
         "num_key_value_heads": 1}),
    Case("rwkv", "two-layers", RWKV, n_prompt=40, adjust=stir_decays),
    Case("rwkv", "three-layers-tied-default-width", {**RWKV, "num_hidden_layers": 3, "tie_word_embeddings": True,
         "intermediate_size": None}, adjust=stir_decays),
    Case("xlstm", "four-heads", XLSTM, n_prompt=40, adjust=stir_gates),
    Case("xlstm", "narrow-keys-tight-caps-large-eps", {**XLSTM, "hidden_size": 32, "qk_dim_factor": 0.5,
         "num_hidden_layers": 3, "gate_soft_cap": 1.5, "output_logit_soft_cap": 4.0, "eps": 0.2,
         "ffn_round_up_to_multiple_of": 8, "ffn_proj_factor": 1.4}, adjust=stir_gates),
    Case("xlstm", "wide-values-two-heads", {**XLSTM, "hidden_size": 48, "v_dim_factor": 1.5, "num_heads": 2,
         "norm_eps": 0.2}, adjust=stir_gates),
    Case("doge", "grouped", {**SIZES, **GROUPED, "keep_window_size": 30}, adjust=stir_biases),
    Case("doge", "biased-tied-window-of-keys", {**SIZES, **FULL, "attention_bias": True, "mlp_bias": True,
         "tie_word_embeddings": True, "sliding_window": 9}, adjust=stir_biases),
    Case("zaya", "three-experts", ZAYA, adjust=stir_routers),
    Case("zaya", "biased-untied-local-wide-convolutions", {**ZAYA, "rms_norm_eps": 0.2, "attention_bias": True,
         "lm_head_bias": True, "tie_word_embeddings": False, "cca_time0": 3, "cca_time1": 4, "num_key_value_heads": 1,
         "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 5,
         "rope_parameters": {"hybrid": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0,
         "partial_rotary_factor": 0.5}, "hybrid_sliding": {"rope_type": "default", "rope_theta": 100.0,
         "partial_rotary_factor": 1.0}}}, adjust=stir_routers),
    Case("zaya", "gelu-narrow-convolutions-half-heads", {**ZAYA, "num_hidden_layers": 2, "hidden_act": "gelu",
         "cca_time0": 1, "cca_time1": 1, "num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 4},
         adjust=stir_routers),
]
# fmt: on
