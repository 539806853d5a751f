"""Recent decoders with experts, whose mechanisms older families have too."""

from tests.families._case import FULL, GROUPED, LINEAR, SIZES, YARN, Case, rope
from tests.families.latent import DEEPSEEK
from tests.families.latent import YARN as YARN_MSCALE
from tests.families.moe import GLM, GRANITE, QWEN, corrected

DOTS = {**GLM, "n_shared_experts": 1}
SOLAR = {**DOTS, "head_dim": 8}
GLM_LITE = dict(DEEPSEEK)
MINIMAX = {**SIZES, **GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
EXAONE = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "sliding_window": 5,
}
HUNYUAN = {**SIZES, **GROUPED, "head_dim": 8, "num_experts": 6, "moe_topk": 2}
DBRX = {
    **{name: SIZES[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 40,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
}
MELLUM = {
    **QWEN,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
HY = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
ARIA = {**SIZES, **GROUPED, "moe_num_experts": 5, "moe_topk": 2}
COHERE = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_norm_eps": 0.02,
    "logit_scale": 0.7,
    "num_hidden_layers": 3,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 1.6}
LOCAL = {
    **SIZES,
    **GROUPED,
    "attention_multiplier": 0.3,
    "num_hidden_layers": 3,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
LOCAL_MOE = {**LOCAL, "num_local_experts": 5, "num_experts_per_tok": 2}
for fields, unknown in (
    (SOLAR, "intermediate_size"),
    (SOLAR, "first_k_dense_replace"),
    (GLM_LITE, "first_k_dense_replace"),
):
    del fields[unknown]

# fmt: off
CASES: list[Case] = [
    Case("dots1", "tied-yarn-two-dense", {**DOTS, **YARN, "first_k_dense_replace": 2, "tie_word_embeddings": True,
         "num_experts_per_tok": 3}, adjust=corrected),
    Case("solar_open", "not-renormalised-tied-yarn", {**SOLAR, **YARN, "norm_topk_prob": False,
         "tie_word_embeddings": True}, adjust=corrected),
    Case("glm4_moe_lite", "no-query-latent-yarn-last-dense", {**GLM_LITE, **YARN_MSCALE, "q_lora_rank": None,
         "n_group": 1, "topk_group": 1, "mlp_layer_types": ["sparse", "dense"]}, adjust=corrected),
    Case("sarvam_moe", "biased-tied-groups-scaled", {**GLM, **YARN, "head_dim": 16, "attention_bias": True, "n_group": 4,
         "topk_group": 2, "tie_word_embeddings": True}, adjust=corrected),
    Case("sarvam_mla", "biased-yarn-tied", {**GLM_LITE, **YARN_MSCALE, "q_lora_rank": None, "first_k_dense_replace": 1,
         "attention_bias": True, "tie_word_embeddings": True}, adjust=corrected),
    Case("minimax_m2", "rotary-dimension-tied-three-of-six", {**MINIMAX, "rotary_dim": 4, "tie_word_embeddings": True,
         "num_local_experts": 6, "num_experts_per_tok": 3}, adjust=corrected),
    Case("exaone_moe", "hybrid", EXAONE, adjust=corrected),
    Case("hunyuan_v1_moe", "choices-by-layer-biased-tied-alpha", {**HUNYUAN, "moe_topk": [1, 3], "attention_bias": True,
         "tie_word_embeddings": True, "head_dim": 16, **rope("dynamic", factor=1.0, alpha=30.0)}),
    Case("granitemoeshared", "shared", {**GRANITE, **MULTIPLIERS, "shared_intermediate_size": 28}),
    Case("granite_swa", "two-local", {**LOCAL, **MULTIPLIERS, "tie_word_embeddings": False}),
    Case("granite_swa", "linear-local-first", {**LOCAL, **LINEAR, "layer_rope_theta": [100, 0, 2000.0],
         "tie_word_embeddings": False, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    Case("granitemoe_swa", "one-base-unturned-biased-shared-tied", {**LOCAL_MOE, **FULL, "layer_rope_theta": [0, 100.0,
         500.0], "attention_bias": True, "shared_intermediate_size": 20, "tie_word_embeddings": True,
         "num_experts_per_tok": 3}),
    Case("dbrx", "grouped-clipped", DBRX),
    Case("dbrx", "full-not-renormalised-gelu", {**DBRX, "attn_config": {"kv_n_heads": 4, "clip_qkv": 3.0,
         "rope_theta": 10000.0}, "ffn_config": {**DBRX["ffn_config"], "moe_normalize_expert_weights": None,
         "ffn_act_fn": {"name": "gelu"}}}),
    Case("mellum", "biased-tied-first-dense-local-unscaled", {**MELLUM, **FULL,
         "rope_parameters": {"full_attention": YARN["rope_parameters"], "sliding_attention": {"rope_type": "default",
         "rope_theta": 100.0}}, "attention_bias": True, "tie_word_embeddings": True, "mlp_layer_types": ["dense",
         "sparse", "sparse"]}),
    Case("hy_v3", "all-biased-two-shared-tied", {**HY, **FULL, "attention_bias": True, "mlp_bias": True,
         "num_shared_experts": 2, "router_scaling_factor": 1.5, "tie_word_embeddings": True}, adjust=corrected),
    Case("axk1", "groups", {**GLM_LITE, "rope_theta": 100.0}, adjust=corrected),
    Case("aria_text", "biased-gelu-one-shared-tied", {**ARIA, "attention_bias": True, "mlp_bias": True,
         "hidden_act": "gelu", "moe_num_shared_experts": 1, "tie_word_embeddings": True}),
    Case("cohere2_moe", "sigmoid-mean-with-shared-first-dense-biased", {**COHERE, "expert_selection_fn": "sigmoid",
         "num_shared_experts": 2, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 20,
         "attention_bias": True, "rope_theta": 100.0}),
    Case("cohere2_moe", "rms-norm-sum-with-shared-dense-unturned-untied", {**COHERE, "rms_norm_eps": 0.03,
         "expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 1,
         "shared_expert_combination_strategy": "sum", "prefix_dense_sliding_window_pattern": 2,
         "layer_types": ["full_attention", "full_attention", "sliding_attention"], "mlp_layer_types": ["dense",
         "sparse", "sparse"], "tie_word_embeddings": False}),
]
# fmt: on
