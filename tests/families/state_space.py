"""Decoders with state-space or linear-attention mixers."""

from torch import nn

from tests.families._case import Case


def stir(model: nn.Module) -> None:
    """Convolutions of order one, so that the taps count, and decays that differ from channel to channel."""
    for name, parameter in model.named_parameters():
        if "conv" in name and parameter.ndim == 3:
            parameter.mul_(2.5)
        if name.endswith("A_log"):
            parameter.mul_(2.0)


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

CASES: list[Case] = [
    Case("mamba", "tied", MAMBA, adjust=stir),
    Case(
        "mamba",
        "untied-biased-narrow",
        {**MAMBA, "use_bias": True, "tie_word_embeddings": False, "expand": 1, "time_step_rank": 3},
        n_prompt=40,
        adjust=stir,
    ),
    Case(
        "mamba",
        "no-conv-bias-three-taps-gelu",
        {**MAMBA, "use_conv_bias": False, "conv_kernel": 3, "hidden_act": "gelu", "residual_in_fp32": False},
        adjust=stir,
    ),
    Case("mamba2", "grouped", MAMBA2, n_prompt=70, adjust=stir),
    Case(
        "mamba2",
        "one-group-biased-tied-limited-steps",
        {**MAMBA2, "n_groups": 1, "use_bias": True, "tie_word_embeddings": True, "time_step_limit": (0.3, 0.7)},
        adjust=stir,
    ),
    Case(
        "mamba2",
        "group-per-head-narrow-stream-no-conv-bias",
        {**MAMBA2, "n_groups": 8, "residual_in_fp32": False, "use_conv_bias": False, "conv_kernel": 2},
        adjust=stir,
    ),
]
