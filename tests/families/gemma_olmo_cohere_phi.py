"""Decoders of the Gemma, OLMo, Command R, StableLM and Phi lines, and some that are LLaMA but for a detail."""

from torch import nn

from tests.families._case import FULL, GROUPED, LINEAR, LLAMA3, SIZES, YARN, Case, rope

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIASED = {"attention_bias": True}
SHARP = {"rope_theta": 100.0}
KV2 = {"num_key_value_heads": 2}
WIDE = {"head_dim": 16}
FOUR = {"num_hidden_layers": 4}
LAYER_NORM = {"layer_norm_eps": 0.03}


def by_type(full: dict, sliding: dict) -> dict:
    """Rotary embeddings of two types of layers."""
    both = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": {name: given["rope_parameters"] for name, given in both.items()}}


def every(n: int, of: int) -> dict:
    """Layer types of so many layers, every n-th of which sees everything."""
    return {"layer_types": ["sliding_attention" if (i + 1) % n else "full_attention" for i in range(of)]}


def norms_near_one(model: nn.Module) -> None:
    """Norms whose weights are a matrix, a row for each head, were drawn as if they were projections."""
    for name, parameter in model.named_parameters():
        if name.endswith("_norm.weight") and parameter.ndim == 2:
            parameter.add_(1.0)


def scale_layers(model: nn.Module) -> None:
    """Each layer scales the stream by a number of its own, and scores are not so large that rounding grows."""
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.5 + 0.2 * int(name.split(".")[2]))
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.mul_(0.4)


PLAIN, TURNING = rope("default"), rope("default", rope_theta=30.0)

# Fields that are refused when they are not at their default.
REFUSED = {
    "gemma": {"use_bidirectional_attention"},
}

# fmt: off
GEMMAS = [
    Case("gemma", "biased-untied-linear", {**SIZES, **FULL, **LINEAR, **BIASED, **UNTIED, "head_dim": 8}),
    Case("gemma3_text", "grouped-window", {**SIZES, **GROUPED, **WIDE, **by_type(PLAIN, TURNING), "sliding_window": 5,
         "sliding_window_pattern": 2, "query_pre_attn_scalar": 9}),
    Case(
        "gemma3_text",
        "old-rope-fields-biased-untied-capped",
        {
            **SIZES,
            **FULL,
            **BIASED,
            **UNTIED,
            **FOUR,
            "head_dim": 8,
            "rope_theta": 700.0,
            "rope_local_base_freq": 30.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "sliding_window": 4,
            "sliding_window_pattern": 3,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 0.5,  # which the attention of transformers does not take
        },
    ),
]
NEAR_LLAMA = [
    Case("cwm", "no-windows-yarn", {**SIZES, **FULL, **YARN, **every(1, 2), "head_dim": 8, "sliding_window": 5}),
    Case("iquestcoder", "yarn-gelu", {**SIZES, **GROUPED, **YARN, "head_dim": 8, "hidden_act": "gelu"}),
    Case("ministral", "no-windows-yarn", {**SIZES, **FULL, **YARN, **every(1, 2), "head_dim": 8, "sliding_window": 5}),
    Case("starcoder2", "grouped-tied-window", {**SIZES, **KV2, **SHARP, "norm_epsilon": 0.03, "sliding_window": 5}),
]
PHIS = [
    Case("phi", "half-rotary", {**SIZES, **LAYER_NORM, **SHARP}),
]
STABLELMS = [
    Case("stablelm", "parallel-normed", {**SIZES, **KV2, **LAYER_NORM, **SHARP, "qk_layernorm": True,
         "use_parallel_residual": True}),
    Case("stablelm", "sequential-normed-biased", {**SIZES, **LAYER_NORM, "num_key_value_heads": 1, "qk_layernorm": True,
         "use_qkv_bias": True, "partial_rotary_factor": 1.0}),
]
OLMOS = [
    Case("olmo", "full-clipped", {**SIZES, **SHARP, "clip_qkv": 0.8}),
    Case("olmo2", "grouped", {**SIZES, **GROUPED, **SHARP}),
    Case("olmo3", "biased-tied-two-rotaries", {**SIZES, **FULL, **BIASED, **TIED, **every(2, 2), **by_type(LLAMA3,
         TURNING), "sliding_window": 4}),
]
COHERES = [
    Case("cohere", "grouped", {**SIZES, **KV2, **LAYER_NORM, **SHARP, "logit_scale": 0.7, "model_max_length": 99}),
    Case("cohere", "normed-grouped-untied", {**SIZES, **KV2, **LAYER_NORM, **UNTIED, **SHARP, "use_qk_norm": True,
         "logit_scale": 1.4}, adjust=norms_near_one),
    Case("cohere2", "grouped-window", {**SIZES, **KV2, **LAYER_NORM, **SHARP, **every(2, 2), "sliding_window": 5,
         "logit_scale": 0.7}),
    Case("cohere2", "pattern-linear", {**SIZES, **KV2, **LAYER_NORM, **LINEAR, **FOUR, "layer_switch": 3,
         "position_embedding_type": "rope_gptj", "use_parallel_block": True, "sliding_window_pattern": 3,
         "sliding_window": 6, "logit_scale": 0.4}),
]
# fmt: on
COMPASS = {**SIZES, **KV2, **LAYER_NORM, "logit_scale": 0.7}
# fmt: off
COMPASSES = [
    Case("cohere_compass_text", "windows-no-rotary-in-full-layers-untied", {**COMPASS, **FOUR, **UNTIED, **BIASED,
         **every(2, 4), "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0,
         "mrope_section": [2, 1, 1]}, "full_attention": None}, "sliding_window": 5, "logit_scale": None}),
]
# fmt: on

GEMMA4 = {**SIZES, "rms_norm_eps": 0.02, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
# fmt: off
GEMMA4S = [
    Case(
        "gemma4_text",
        "everything",
        {
            **GEMMA4,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
            "rms_norm_eps": 0.3,  # else the scale of ln1, which q_norm undoes, would not matter where keys are borrowed
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 6,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 2.0,
            "use_bidirectional_attention": "vision",
        },
        adjust=scale_layers,
    ),
    Case("gemma4_text", "plain-untied-two-rotaries", {**GEMMA4, **every(2, 2), **UNTIED, **by_type(rope("proportional",
         partial_rotary_factor=0.5, factor=2.0), TURNING), "sliding_window": 4, "hidden_size_per_layer_input": 0,
         "hidden_activation": "silu"}, adjust=scale_layers),
    Case("gemma4_text", "biased-per-layer", {**GEMMA4, **every(3, 3), **BIASED, "num_hidden_layers": 3,
         "sliding_window": 6, "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 4}, adjust=scale_layers),
    Case("gemma4_text", "experts-beside-an-mlp", {**GEMMA4, **every(2, 2), "sliding_window": 5,
         "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
         "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12},
         adjust=scale_layers),
    Case("gemma4_text", "borrowing-biased-linear", {**GEMMA4, **BIASED, **FOUR, "rms_norm_eps": 0.1, **by_type(LINEAR,
         PLAIN), "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
         "sliding_window": 5, "attention_k_eq_v": True, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 61,
         "hidden_size_per_layer_input": 6}),
]
# fmt: on
CASES: list[Case] = [*GEMMAS, *NEAR_LLAMA, *PHIS, *STABLELMS, *OLMOS, *COHERES, *COMPASSES, *GEMMA4S]
