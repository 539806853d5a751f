"""Decoders since 2024: multipliers, layers without positions, norms in other places, activations without a gate."""

from tests.families._case import FULL, GROUPED, LINEAR, LLAMA3, SIZES, YARN, YARN_MSCALE, Case, rope

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

# fmt: off
GRANITES = [
    Case("granite", "grouped", {**SIZES, **GROUPED, **SHARP, **GRANITE}),
    Case("hyperclovax", "one-norm-biased-tied-yarn", {**SIZES, **FULL, **YARN, **GRANITE, **BIASED, **TIED,
         "mlp_bias": True, "use_post_norm": False}),
]
SMOLLM3S = [
    Case("smollm3", "every-second-unturned", {**SIZES, **GROUPED, **SHARP, "no_rope_layer_interval": 2}),
]
GLMS = [
    Case("glm", "grouped", {**SIZES, **GROUPED, **SHARP, "head_dim": 8}),
    Case("glm4", "grouped", {**SIZES, **GROUPED, **SHARP, "head_dim": 8}),
]
UNGATED = [
    Case("nemotron", "grouped", {**NEMOTRON, **SHARP, "kv_channels": 8}),
    Case("arcee", "biased-tied-yarn", {**SIZES, **FULL, **YARN_MSCALE, **BIASED, **TIED, "mlp_bias": True}),
    Case("jais2", "unbiased-tied-gelu", {**JAIS, **TIED, "num_key_value_heads": 4, "attention_bias": False,
         "mlp_bias": False, "hidden_act": "gelu"}),
    Case("apertus", "grouped-llama3", {**SIZES, **GROUPED, **LLAMA3, "qk_norm": True, "post_norm": False}),
    Case("apertus", "biased-tied",    {**SIZES, **FULL, **BIASED, **TIED, **rope("default")}),
    Case("apertus1p5_text", "shortened-head-yarn", {**SIZES, **GROUPED, **YARN, "output_vocab_size": 50}),
]
TURNED_BY_PAIRS = [
    Case("helium", "biased-tied", {**SIZES, **FULL, **BIASED, **TIED, "mlp_bias": True, "head_dim": 8}),
    Case("ernie4_5", "biased-untied-wide", {**SIZES, **FULL, **UNTIED, "use_bias": True, "head_dim": 16}),
]
EXAONES = [
    Case("exaone", "biased-tied-llama3", {**SIZES, **FULL, **LLAMA3, **BIASED, **TIED, "mlp_bias": True, "head_dim": 8}),
    Case("exaone4", "hybrid", {**SIZES, **GROUPED, **SHARP, **FOUR, "sliding_window": 5, "sliding_window_pattern": 2}),
]
OTHERS = [
    Case("vaultgemma", "grouped-tight-caps", {**SIZES, **GROUPED, "head_dim": 16, "query_pre_attn_scalar": 24,
         "sliding_window": 5, **CAPS}),
    Case("seed_oss", "all-biased-tied", {**SIZES, **FULL, **TIED, "attention_out_bias": True, "mlp_bias": True,
         "head_dim": 8}),
    Case("hunyuan_v1_dense", "grouped", {**SIZES, **GROUPED, **SHARP, "head_dim": 8}),
    Case("hunyuan_v1_dense", "alpha-biased-tied", {**SIZES, **FULL, **BIASED, **TIED, **OF_RELATIVES, **rope("dynamic",
         factor=1.0, alpha=30.0, beta_fast=32), "head_dim": 8}, n_prompt=40),
    Case("internlm3", "biased-tied-wide", {**SIZES, **FULL, **TIED, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    Case("nanochat", "full", {**SIZES, **FULL, **SHARP, "logits_soft_cap": 15.0}),
    Case("nanochat", "linear-uncapped-gelu", {**SIZES, **FULL, **LINEAR, "final_logit_softcapping": None,
         "hidden_act": "gelu"}),
    Case("bitnet", "grouped", {**SIZES, **GROUPED, **SHARP}),
]
# fmt: on

CASES: list[Case] = [*GRANITES, *SMOLLM3S, *GLMS, *UNGATED, *TURNED_BY_PAIRS, *EXAONES, *OTHERS]
