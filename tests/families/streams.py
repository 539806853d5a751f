"""Decoders with several residual streams."""

from torch import nn

from tests.families._case import LINEAR, SIZES, Case, rope
from tests.families.gemma_olmo_cohere_phi import BIASED, UNTIED, by_type


def small_queries(model: nn.Module) -> None:
    """Scores are not so large that rounding grows, and a layer's change is not multiplied by more than about two."""
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.mul_(0.4)
        if name.endswith("altup.modality_router.weight"):
            parameter.mul_(6.0)


def kinds(*names: str) -> dict[str, list[str]]:
    """The types of the layers."""
    return {"layer_types": [f"{name}_attention" for name in names]}


GEMMA3N = {
    **SIZES,
    "rms_norm_eps": 0.05,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 61,
    "altup_num_inputs": 3,
    "laurel_rank": 5,
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.0, 0.0],
}

CASES = [
    Case(
        "gemma3n_text",
        "everything",
        {
            **GEMMA3N,
            **kinds("sliding", "full", "sliding", "sliding", "full"),
            "rms_norm_eps": 0.3,  # else the scale of ln1, which q_norm undoes, would not matter where keys are shared
            "num_hidden_layers": 5,
            "intermediate_size": [48, 40, 48, 32, 56],
            "activation_sparsity_pattern": [0.7, 0.0, 0.4, 0.9, 0.0],
            "sliding_window": 5,
            "vocab_size_per_layer_input": 50,
            "altup_num_inputs": 4,
            "num_kv_shared_layers": 2,
            "final_logit_softcapping": 2.0,
        },
        adjust=small_queries,
    ),
    Case(
        "gemma3n_text",
        "second-stream-active-untied-silu",
        {
            **GEMMA3N,
            **UNTIED,
            **kinds("full", "sliding"),
            **by_type(rope("default", rope_theta=700.0), rope("default", rope_theta=30.0)),
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "activation_sparsity_pattern": [0.0, 0.6],
            "sliding_window": 4,
            "hidden_activation": "silu",
            "final_logit_softcapping": 9.0,
        },
        adjust=small_queries,
    ),
    Case(
        "gemma3n_text",
        "two-streams-biased-linear-one-kv",
        {
            **GEMMA3N,
            **BIASED,
            **kinds("sliding", "full", "full"),
            **by_type(LINEAR, rope("default")),
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "activation_sparsity_pattern": [0.0, 0.3, 0.0],
            "altup_num_inputs": 2,
            "laurel_rank": 9,
            "num_kv_shared_layers": 1,
            "sliding_window": 6,
        },
        adjust=small_queries,
    ),
]
