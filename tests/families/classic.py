"""Decoders with layer norms: GPT-2 and its time."""

from tests.families._case import SIZES, Case

GPT2 = {
    "vocab_size": 61,
    "n_positions": 40,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "layer_norm_epsilon": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Fields that are refused when they are not at their default.
REFUSED = {"gpt2": {"add_cross_attention"}}

CASES: list[Case] = [
    Case("gpt2", "tied", GPT2),
    Case("gpt2", "untied-narrow-mlp", {**GPT2, "tie_word_embeddings": False, "n_inner": 20}),
    Case("gpt2", "inverse-layer-scale", {**GPT2, "n_layer": 3, "scale_attn_by_inverse_layer_idx": True}),
    Case("gpt2", "unscaled-scores-relu", {**GPT2, "scale_attn_weights": False, "activation_function": "relu"}),
    Case("gpt_neox", "parallel", {**SIZES, "layer_norm_eps": 0.02}),
    Case("gpt_neox", "sequential", {**SIZES, "layer_norm_eps": 0.02, "use_parallel_residual": False}),
    Case("gpt_neox", "all-rotary-no-bias", {**SIZES, "rotary_pct": 1.0, "attention_bias": False}),
    Case("gpt_neox", "half-rotary-tied", {**SIZES, "rotary_pct": 0.5, "tie_word_embeddings": True}),
    Case(
        "gpt_neox",
        "linear",
        {**SIZES, "rope_scaling": {"type": "linear", "factor": 3.0}, "rotary_emb_base": 100},
    ),
]
