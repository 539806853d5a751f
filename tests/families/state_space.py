"""Decoders with state-space or linear-attention mixers."""

import torch
from torch import nn

from tests.families._case import GROUPED, SIZES, Case


def stir(model: nn.Module) -> None:
    """Taps of order one, so that they count; steps on both sides of 0.7, and decays, that differ between channels.

    Steps and decays are set: transformers draws what it begins with from the process's generator.
    """
    for name, parameter in model.named_parameters():
        if "conv" in name and parameter.ndim == 3:
            parameter.mul_(2.5)
        if name.endswith("A_log"):
            parameter.mul_(2.0)
        if name.endswith(("dt_bias", "dt_proj.bias", "recurrent_param")):
            parameter.copy_(torch.linspace(-2.5, 1.5, len(parameter)))


MAMBA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 5,
    "layer_norm_epsilon": 0.02,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA2 = {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16}
RECURRENT_GEMMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "attention_window_size": 5,
    "rms_norm_eps": 0.02,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BAMBA = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 4,
    "attn_layer_indices": [0, 2],
    "mamba_n_heads": 8,
    "mamba_d_state": 5,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}

GRANITE = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 28,
    "attention_multiplier": 0.3,
    "mamba_n_heads": 8,
    "mamba_d_state": 5,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}

# With a limit on its steps a model is generated from without a cache: single steps of transformers pass over the limit.
# fmt: off
CASES: list[Case] = [
    Case("mamba", "tied", MAMBA, adjust=stir),
    Case("mamba", "untied-biased-narrow", {**MAMBA, "use_bias": True, "tie_word_embeddings": False, "expand": 1,
         "time_step_rank": 3}, n_prompt=40, adjust=stir),
    Case("mamba", "no-conv-bias-three-taps-gelu", {**MAMBA, "use_conv_bias": False, "conv_kernel": 3,
         "hidden_act": "gelu", "residual_in_fp32": False}, adjust=stir),
    Case("mamba2", "grouped", MAMBA2, n_prompt=70, adjust=stir),
    Case("mamba2", "one-group-biased-tied-limited-steps", {**MAMBA2, "n_groups": 1, "use_bias": True,
         "tie_word_embeddings": True, "time_step_limit": (0.3, 0.7)}, adjust=stir),
    Case("recurrent_gemma", "two-to-one", RECURRENT_GEMMA, adjust=stir),
    Case("recurrent_gemma", "grouped-biased-untied-narrow-state", {**RECURRENT_GEMMA, "num_key_value_heads": 2,
         "attention_bias": True, "tie_word_embeddings": False, "lru_width": 20, "block_types": ["attention",
         "recurrent"], "attention_window_size": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0,
         "partial_rotary_factor": 1.0}, "conv1d_width": 3}, n_prompt=20, adjust=stir),
    Case("recurrent_gemma", "attention-first-tight-cap-silu", {**RECURRENT_GEMMA, "block_types": ["attention",
         "recurrent", "recurrent"], "logits_soft_cap": 2.0, "hidden_activation": "silu"}, adjust=stir),
    Case("bamba", "two-attention-layers", BAMBA, adjust=stir),
    Case("granitemoehybrid", "experts", {**GRANITE, "embedding_multiplier": 3.0, "residual_multiplier": 0.7,
         "logits_scaling": 1.6}, adjust=stir),
]
# fmt: on
