"""Decoders with RMS norms, rotary positions and gated MLPs: LLaMA and its descendants."""

from tests.families._case import (
    DYNAMIC,
    FULL,
    GROUPED,
    LINEAR,
    LLAMA3,
    LONGROPE,
    LONGROPE_PARTIAL,
    SIZES,
    YARN,
    YARN_MSCALE,
    Case,
)

# Fields that are refused when they are not at their default.
REFUSED = {"gemma2": {"use_bidirectional_attention"}}

CASES: list[Case] = [
    Case("llama", "grouped", {**SIZES, **GROUPED, "rope_theta": 100.0}),
    Case(
        "llama",
        "biased-tied",
        {**SIZES, **FULL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Case("llama", "wide-heads-one-kv", {**SIZES, **GROUPED, "num_key_value_heads": 1, "head_dim": 16}),
    Case("llama", "linear", {**SIZES, **FULL, **LINEAR}),
    Case(
        "llama",
        "old-linear",
        {**SIZES, **FULL, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 50.0},
    ),
    Case("llama", "dynamic", {**SIZES, **GROUPED, **DYNAMIC}, n_prompt=64),
    Case("llama", "llama3", {**SIZES, **GROUPED, **LLAMA3}),
    Case("llama", "yarn", {**SIZES, **GROUPED, **YARN}),
    Case("llama", "longrope", {**SIZES, **GROUPED, **LONGROPE}, n_prompt=64),
    Case("mistral", "window", {**SIZES, **GROUPED, "sliding_window": 5}),
    Case("mistral", "no-window-wide-heads", {**SIZES, **GROUPED, "sliding_window": None, "head_dim": 16}),
    Case(
        "mistral",
        "tied-gelu",
        {**SIZES, **FULL, "sliding_window": 3, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    Case("qwen2", "grouped", {**SIZES, **GROUPED}),
    Case("qwen2", "tied-yarn", {**SIZES, **FULL, **YARN_MSCALE, "tie_word_embeddings": True}),
    Case(
        "qwen2",
        "window-from-layer-1",
        {**SIZES, **GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    Case(
        "qwen2",
        "window-by-layer-types",
        {
            **SIZES,
            **GROUPED,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case("qwen3", "grouped", {**SIZES, **GROUPED, "head_dim": 16}),
    Case(
        "qwen3",
        "biased-tied",
        {**SIZES, **FULL, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    Case(
        "qwen3",
        "window-dynamic",
        {
            **SIZES,
            **GROUPED,
            **DYNAMIC,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
        n_prompt=64,
    ),
    Case(
        "gemma2",
        "grouped",
        {**SIZES, **GROUPED, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 9},
    ),
    Case(
        "gemma2",
        "untied-biased-no-caps",
        {
            **SIZES,
            **GROUPED,
            "head_dim": 8,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 5,
        },
    ),
    Case(
        "gemma2",
        "tight-caps-all-local",
        {
            **SIZES,
            **FULL,
            **LINEAR,
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "layer_types": ["sliding_attention", "sliding_attention"],
        },
    ),
    Case("phi3", "grouped-partial-rotary", {**SIZES, **GROUPED, "partial_rotary_factor": 0.5}),
    Case("phi3", "window-tied", {**SIZES, **FULL, "sliding_window": 5, "tie_word_embeddings": True}),
    Case(
        "phi3",
        "longrope",
        {**SIZES, **GROUPED, **LONGROPE, "original_max_position_embeddings": 40},
        n_prompt=64,
    ),
    Case("phi3", "partial-longrope", {**SIZES, **FULL, **LONGROPE_PARTIAL}, n_prompt=64),
]
