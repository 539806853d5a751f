"""Decoders since 2024: multipliers, layers without positions, norms in other places, activations without a gate."""

from tests.families._case import DYNAMIC, FULL, GROUPED, LINEAR, LLAMA3, SIZES, YARN, YARN_MSCALE, Case, rope

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIASED = {"attention_bias": True}
FOUR = {"num_hidden_layers": 4}
SHARP = {"rope_theta": 100.0}
NEMOTRON = {**SIZES, "num_key_value_heads": 2, "norm_eps": 0.02}
JAIS = {**SIZES, "num_key_value_heads": 2, "layer_norm_eps": 0.02}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.7}
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
# What the configs of published checkpoints say besides.
OF_RELATIVES = {
    **dict.fromkeys(("use_cla", "use_mla", "use_mixed_mlp_moe", "position_embedding_xdrope", "skip_cls_token"), False),
    **dict.fromkeys(("use_qk_norm", "use_rotary_pos_emb", "norm_topk_prob"), True),
    **dict.fromkeys(("cla_share_factor", "num_experts", "num_shared_expert", "pad_id", "im_end_id"), 1),
    "moe_layer_num_skipped": 0,
    "dense_list": [32, 0],
    "norm_type": "rms",
    "q_lora_rank": None,
}

GRANITES = [
    Case("granite", "grouped", {**SIZES, **GROUPED, **SHARP, **GRANITE}),
    Case(
        "granite",
        "biased-tied-yarn",
        {**SIZES, **FULL, **YARN, **GRANITE, **BIASED, **TIED, "mlp_bias": True, "residual_multiplier": 1.7},
    ),
    Case("granite", "wide-heads-no-multipliers", {**SIZES, **GROUPED, "head_dim": 16}),
    Case("hyperclovax", "grouped", {**SIZES, **GROUPED, **SHARP, **GRANITE}),
    Case(
        "hyperclovax",
        "one-norm-biased-tied-yarn",
        {**SIZES, **FULL, **YARN, **GRANITE, **BIASED, **TIED, "mlp_bias": True, "use_post_norm": False},
    ),
    Case("hyperclovax", "wide-heads-no-multipliers", {**SIZES, **GROUPED, "head_dim": 16}),
]
SMOLLM3S = [
    Case("smollm3", "every-second-unturned", {**SIZES, **GROUPED, **SHARP, "no_rope_layer_interval": 2}),
    Case(
        "smollm3",
        "untied-biased-window",
        {
            **SIZES,
            **FULL,
            **SHARP,
            **BIASED,
            **UNTIED,
            "mlp_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "no_rope_layers": [0, 1, 0],
        },
    ),
    Case(
        "smollm3",
        "dynamic-window-by-layer-types",
        {
            **SIZES,
            **GROUPED,
            **DYNAMIC,
            "head_dim": 16,
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "max_window_layers": 28,
        },
        n_prompt=64,
    ),
]
GLMS = [
    Case("glm", "grouped", {**SIZES, **GROUPED, **SHARP, "head_dim": 8}),
    Case("glm", "tied-unbiased-wide", {**SIZES, **FULL, "head_dim": 16, "attention_bias": False, **TIED}),
    Case("glm", "all-rotary-linear-gelu", {**SIZES, **FULL, **LINEAR, "head_dim": 8, "hidden_act": "gelu"}),
    Case("glm", "partial-yarn", {**SIZES, **GROUPED, **YARN, "head_dim": 16}),
    Case("glm4", "grouped", {**SIZES, **GROUPED, **SHARP, "head_dim": 8}),
    Case("glm4", "tied-unbiased-wide", {**SIZES, **FULL, "head_dim": 16, "attention_bias": False, **TIED}),
    Case(
        "glm4",
        "quarter-rotary-yarn",
        {
            **SIZES,
            **GROUPED,
            **rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, partial_rotary_factor=0.25),
            "head_dim": 16,
        },
    ),
]
UNGATED = [
    Case("nemotron", "grouped", {**NEMOTRON, **SHARP, "kv_channels": 8}),
    Case(
        "nemotron",
        "biased-tied-gelu",
        {**NEMOTRON, **BIASED, **TIED, "mlp_bias": True, "hidden_act": "gelu", "head_dim": 16},
    ),
    Case("nemotron", "all-rotary-one-kv", {**NEMOTRON, "num_key_value_heads": 1, "partial_rotary_factor": 1.0}),
    Case(
        "nemotron",
        "quarter-rotary-linear",
        {**NEMOTRON, **rope("linear", factor=3.0, partial_rotary_factor=0.25), "head_dim": 16},
    ),
    Case("arcee", "grouped", {**SIZES, **GROUPED, **SHARP}),
    Case("arcee", "biased-tied-yarn", {**SIZES, **FULL, **YARN_MSCALE, **BIASED, **TIED, "mlp_bias": True}),
    Case("arcee", "wide-heads-gelu", {**SIZES, **GROUPED, "head_dim": 16, "hidden_act": "gelu"}),
    Case("jais2", "grouped", {**JAIS, **SHARP}),
    Case(
        "jais2",
        "unbiased-tied-gelu",
        {**JAIS, **TIED, "num_key_value_heads": 4, "attention_bias": False, "mlp_bias": False, "hidden_act": "gelu"},
    ),
    Case("jais2", "wide-heads-one-kv-llama3", {**JAIS, **LLAMA3, "num_key_value_heads": 1, "head_dim": 16}),
    Case("apertus", "grouped-llama3", {**SIZES, **GROUPED, **LLAMA3, "qk_norm": True, "post_norm": False}),
    Case("apertus", "biased-tied", {**SIZES, **FULL, **BIASED, **TIED, **rope("default")}),
    Case("apertus", "wide-heads-relu2", {**SIZES, **GROUPED, **rope("default"), "head_dim": 16, "hidden_act": "relu2"}),
]
TURNED_BY_PAIRS = [
    Case("helium", "grouped", {**SIZES, **GROUPED, **SHARP, "head_dim": 8}),
    Case("helium", "biased-tied", {**SIZES, **FULL, **BIASED, **TIED, "mlp_bias": True, "head_dim": 8}),
    Case("helium", "dynamic", {**SIZES, **FULL, **DYNAMIC, "head_dim": 8}, n_prompt=64),
    Case("ernie4_5", "grouped", {**SIZES, **GROUPED, **SHARP, "head_dim": 8}),
    Case("ernie4_5", "biased-untied-wide", {**SIZES, **FULL, **UNTIED, "use_bias": True, "head_dim": 16}),
    Case("ernie4_5", "linear", {**SIZES, **GROUPED, **LINEAR, "head_dim": 8}),
]
EXAONES = [
    Case(
        "exaone4",
        "hybrid",
        {**SIZES, **GROUPED, **SHARP, **FOUR, "sliding_window": 5, "sliding_window_pattern": 2},
    ),
    Case(
        "exaone4",
        "all-global-tied",
        {**SIZES, **FULL, **LLAMA3, **TIED, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    Case(
        "exaone4",
        "global-first-wide",
        {
            **SIZES,
            **GROUPED,
            **SHARP,
            "head_dim": 16,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
]
OTHERS = [
    Case(
        "vaultgemma",
        "grouped-tight-caps",
        {**SIZES, **GROUPED, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5, **CAPS},
    ),
    Case("seed_oss", "grouped-wide", {**SIZES, **GROUPED, **SHARP, "head_dim": 16}),
    Case(
        "seed_oss",
        "all-biased-tied",
        {**SIZES, **FULL, **TIED, "attention_out_bias": True, "mlp_bias": True, "head_dim": 8},
    ),
    Case("seed_oss", "unbiased-linear", {**SIZES, **GROUPED, **LINEAR, "attention_bias": False, "head_dim": 8}),
    Case("hunyuan_v1_dense", "grouped", {**SIZES, **GROUPED, **SHARP, "head_dim": 8}),
    Case(
        "hunyuan_v1_dense",
        "alpha-biased-tied",
        {
            **SIZES,
            **FULL,
            **BIASED,
            **TIED,
            **OF_RELATIVES,
            **rope("dynamic", factor=1.0, alpha=30.0, beta_fast=32),
            "head_dim": 8,
        },
        n_prompt=40,
    ),
    Case("hunyuan_v1_dense", "dynamic-wide", {**SIZES, **GROUPED, **DYNAMIC, "head_dim": 16}, n_prompt=64),
    Case("internlm3", "grouped", {**SIZES, **GROUPED, **SHARP, "head_dim": 8}),
    Case("internlm3", "biased-tied-wide", {**SIZES, **FULL, **TIED, "qkv_bias": True, "bias": True, "head_dim": 16}),
    Case("internlm3", "dynamic", {**SIZES, **GROUPED, **DYNAMIC, "head_dim": 8}, n_prompt=64),
    Case("nanochat", "full", {**SIZES, **FULL, **SHARP, "logits_soft_cap": 15.0}),
    Case(
        "nanochat",
        "grouped-biased-tied-tight-cap",
        {**SIZES, **GROUPED, **BIASED, **TIED, "final_logit_softcapping": 2.0},
    ),
    Case(
        "nanochat",
        "linear-uncapped-gelu",
        {**SIZES, **FULL, **LINEAR, "final_logit_softcapping": None, "hidden_act": "gelu"},
    ),
    Case("bitnet", "grouped", {**SIZES, **GROUPED, **SHARP}),
    Case("bitnet", "biased-tied-silu", {**SIZES, **FULL, **BIASED, **TIED, "hidden_act": "silu"}),
    Case("bitnet", "one-kv-yarn", {**SIZES, **GROUPED, **YARN, "num_key_value_heads": 1}),
]

CASES: list[Case] = [*GRANITES, *SMOLLM3S, *GLMS, *UNGATED, *TURNED_BY_PAIRS, *EXAONES, *OTHERS]
