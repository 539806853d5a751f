"""Decoders with RMS norms, rotary positions and gated MLPs: LLaMA and its descendants."""

from tests.families._case import (
    DYNAMIC,
    FULL,
    GROUPED,
    LINEAR,
    LLAMA3,
    LONGROPE,
    SIZES,
    YARN,
    Case,
)

# Fields that are refused when they are not at their default.
REFUSED = {"gemma2": {"use_bidirectional_attention"}}

# fmt: off
CASES: list[Case] = [
    Case("llama", "grouped", {**SIZES, **GROUPED, "rope_theta": 100.0}),
    Case("llama", "biased-tied", {**SIZES, **FULL, "attention_bias": True, "mlp_bias": True,
         "tie_word_embeddings": True}),
    Case("llama", "linear",  {**SIZES, **FULL, **LINEAR}),
    Case("llama", "dynamic", {**SIZES, **GROUPED, **DYNAMIC}, n_prompt=64),
    Case("llama", "llama3",  {**SIZES, **GROUPED, **LLAMA3}),
    Case("llama", "yarn",    {**SIZES, **GROUPED, **YARN}),
    Case("mistral", "window", {**SIZES, **GROUPED, "sliding_window": 5}),
    Case("qwen2", "window-from-layer-1", {**SIZES, **GROUPED, "use_sliding_window": True, "sliding_window": 5,
         "max_window_layers": 1}),
    Case("qwen3", "grouped", {**SIZES, **GROUPED, "head_dim": 16}),
    Case("gemma2", "grouped", {**SIZES, **GROUPED, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 9}),
    Case("gemma2", "tight-caps-all-local", {**SIZES, **FULL, **LINEAR, "head_dim": 8, "sliding_window": 4,
         "query_pre_attn_scalar": 4, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0,
         "layer_types": ["sliding_attention", "sliding_attention"]}),
    Case("phi3", "grouped-partial-rotary", {**SIZES, **GROUPED, "partial_rotary_factor": 0.5}),
    Case("phi3", "window-tied",            {**SIZES, **FULL, "sliding_window": 5, "tie_word_embeddings": True}),
    Case("phi3", "longrope", {**SIZES, **GROUPED, **LONGROPE, "original_max_position_embeddings": 40}, n_prompt=64),
]
# fmt: on
