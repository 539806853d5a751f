"""Decoders with several residual streams."""

from torch import nn

from tests.families._case import SIZES, Case, rope
from tests.families.gemma_olmo_cohere_phi import UNTIED, by_type
from tests.families.sparse_attention import DSA, YARN, balanced


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


def strong_connections(model: nn.Module) -> None:
    """As `balanced`; weights of the streams that differ between tokens."""
    balanced(model)
    for name, parameter in model.named_parameters():
        if name.endswith("scale"):
            parameter.add_(0.5)


HY4 = {
    **{name: value for name, value in DSA.items() if name != "first_k_dense_replace"},
    "hc_mult": 3,
    "hc_magnitude": 1.4,
    "hc_eps": 0.03,
    "swiglu_limit": 0.5,
    "n_group": 1,
    "topk_group": 1,
}
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

# fmt: off
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
    Case("gemma3n_text", "second-stream-active-untied-silu", {**GEMMA3N, **UNTIED, **kinds("full", "sliding"),
         **by_type(rope("default", rope_theta=700.0), rope("default", rope_theta=30.0)), "altup_active_idx": 1,
         "altup_correct_scale": False, "activation_sparsity_pattern": [0.0, 0.6], "sliding_window": 4,
         "hidden_activation": "silu", "final_logit_softcapping": 9.0}, adjust=small_queries),
    Case("hy_v4", "shared-keys-groups", {**HY4, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"],
         "mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 4, "topk_group": 2}, adjust=strong_connections),
    Case("hy_v4", "two-streams-yarn-biased-tied-gelu", {**HY4, **YARN, "hc_mult": 2, "hc_magnitude": 0.7, "hc_eps": 0.1,
         "index_topk": 4, "swiglu_limit": 1.0, "attention_bias": True, "tie_word_embeddings": True,
         "hidden_act": "gelu", "norm_topk_prob": False, "n_shared_experts": 1}, adjust=strong_connections),
]
# fmt: on
