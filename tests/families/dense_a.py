"""Decoders since 2023: norms with offsets, behind sublayers or for each head, one norm for both halves, local layers."""

from tests.families._case import DYNAMIC, FULL, GROUPED, LINEAR, LLAMA3, SIZES, YARN, Case

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIASED = {"attention_bias": True}
SHARP = {"rope_theta": 100.0}
KV2, KV4 = {"num_key_value_heads": 2}, {"num_key_value_heads": 4}
LAYERNORM = {**SIZES, "layer_norm_eps": 0.02}
MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
BY_TYPE = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
    }
}
YARN_BY_TYPE = {
    "rope_parameters": {"full_attention": YARN["rope_parameters"], "sliding_attention": {"rope_theta": 90.0}}
}

GEMMAS = [
    Case("gemma", "grouped", {**SIZES, **GROUPED, **SHARP, "head_dim": 16}),
    Case("gemma", "untied-biased", {**SIZES, **FULL, **UNTIED, **BIASED, "head_dim": 8}),
    Case("gemma", "one-kv-linear", {**SIZES, **GROUPED, **LINEAR, "num_key_value_heads": 1, "head_dim": 16}),
    Case(
        "gemma3_text",
        "mixed",
        {**SIZES, **GROUPED, **MIXED, **BY_TYPE, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 4},
    ),
    Case(
        "gemma3_text",
        "by-pattern-scaled",
        {
            **SIZES,
            **FULL,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 5,
            "rope_theta": 70.0,
            "rope_local_base_freq": 20.0,
        },
    ),
    Case(
        "gemma3_text",
        "untied-biased-capped",
        {
            **SIZES,
            **GROUPED,
            **MIXED,
            **UNTIED,
            **BIASED,
            "head_dim": 8,
            "sliding_window": 7,
            "query_pre_attn_scalar": 3,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
]
LOCAL = [
    Case("ministral", "mixed", {**SIZES, **GROUPED, **MIXED, **SHARP, "head_dim": 8, "sliding_window": 5}),
    Case("ministral", "all-local-wide-heads", {**SIZES, **FULL, "head_dim": 16, "sliding_window": 4}),
    Case(
        "ministral", "no-window-tied-yarn", {**SIZES, **GROUPED, **TIED, **YARN, "head_dim": 8, "sliding_window": None}
    ),
    Case("starcoder2", "grouped", {**SIZES, **KV2, **SHARP, "norm_epsilon": 0.02}),
    Case("starcoder2", "untied-unbiased-window", {**SIZES, **KV4, **UNTIED, "use_bias": False, "sliding_window": 5}),
    Case("starcoder2", "one-kv-linear", {**SIZES, **LINEAR, "num_key_value_heads": 1, "hidden_act": "gelu"}),
]
SIDE_BY_SIDE = [
    Case("phi", "half-rotary", {**LAYERNORM, **SHARP}),
    Case("phi", "normed-grouped", {**LAYERNORM, **KV2, "qk_layernorm": True, "partial_rotary_factor": 1.0}),
    Case("phi", "tied-linear", {**LAYERNORM, **TIED, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    Case(
        "stablelm",
        "sequential-biased",
        {**LAYERNORM, **KV2, **SHARP, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    ),
    Case(
        "stablelm",
        "parallel-normed",
        {**LAYERNORM, **KV2, "use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    ),
    Case(
        "stablelm",
        "sequential-normed-tied",
        {**LAYERNORM, **KV4, **TIED, "qk_layernorm": True, "partial_rotary_factor": 1.0},
    ),
    Case("cohere", "grouped", {**LAYERNORM, **KV2, **SHARP, "logit_scale": 0.5}),
    Case("cohere", "normed-biased", {**LAYERNORM, **KV2, **BIASED, "use_qk_norm": True, "logit_scale": 1.5}),
    Case("cohere", "untied-dynamic", {**LAYERNORM, **KV4, **UNTIED, **DYNAMIC, "logit_scale": 1.0}, n_prompt=64),
    Case("cohere2", "mixed", {**LAYERNORM, **KV2, **MIXED, **SHARP, "sliding_window": 5, "logit_scale": 0.5}),
    Case(
        "cohere2",
        "by-pattern-biased",
        {**LAYERNORM, **KV4, **BIASED, "sliding_window": 6, "sliding_window_pattern": 2, "logit_scale": 1.0},
    ),
    Case("cohere2", "untied-all-full", {**LAYERNORM, **KV2, **UNTIED, "layer_types": ["full_attention"] * 2}),
]
OLMOS = [
    Case("olmo", "clipped", {**SIZES, **KV2, **SHARP, "clip_qkv": 0.7}),
    Case("olmo", "tied-biased", {**SIZES, **KV4, **TIED, **BIASED}),
    Case("olmo", "linear", {**SIZES, **KV4, **LINEAR}),
    Case("olmo2", "grouped", {**SIZES, **GROUPED, **SHARP}),
    Case("olmo2", "tied-biased", {**SIZES, **FULL, **TIED, **BIASED}),
    Case("olmo2", "llama3", {**SIZES, **GROUPED, **LLAMA3}),
    Case("olmo3", "mixed-yarn", {**SIZES, **GROUPED, **MIXED, **YARN_BY_TYPE, "sliding_window": 5}),
    Case("olmo3", "plain-heads-by-default", {**SIZES, **FULL, "num_hidden_layers": 4, "sliding_window": 4}),
    Case("olmo3", "tied-biased-all-full", {**SIZES, **FULL, **TIED, **BIASED, "layer_types": ["full_attention"] * 2}),
]

CASES = [*GEMMAS, *LOCAL, *SIDE_BY_SIDE, *OLMOS]
