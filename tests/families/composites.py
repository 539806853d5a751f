"""Language models that exist only inside of composites (images and text, sounds and text), on text alone."""

from typing import Any

from tests.families._case import FULL, GROUPED, SIZES, YARN, Case, embed_padding
from tests.families.streams import HY4, strong_connections

WIDE = {**SIZES, **GROUPED, "head_dim": 16}
TIED = {"tie_word_embeddings": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SPARSE_GLM = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK_OCR = {
    **SIZES,
    **GROUPED,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "mlp_layer_types": ["dense", "sparse"],
    "n_group": 3,
    "topk_group": 2,
}
GEMMA4 = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
MUSE = {**WIDE, "qk_scale_factor": 1.7, "post_norm_eps": 0.1, "output_multiplier": 1.3, "final_logit_softcapping": 4.0}
MLLAMA = {**SIZES, **GROUPED, "num_hidden_layers": 4, "cross_attention_layers": [1, 2]}
MOLMO = {**WIDE, "additional_vocab_size": 7}
ERNIE = {
    **SIZES,
    **GROUPED,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": [20, 12],
    "moe_num_shared_experts": 1,
    "moe_norm_min": 0.1,
}


def axes(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary positions on several axes, with these numbers of pairs."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [*sections], **more}}


COSMOS = {**WIDE, **axes(4, 2, 2), "pad_token_id": 0}

# fmt: off
CASES: list[Case] = [
    Case("qwen2_vl_text", "window-gelu", {**SIZES, **GROUPED, **axes(1, 2, 1), **WINDOW, "hidden_act": "gelu"},
         composite="qwen2_vl"),
    Case("qwen2_5_vl_text", "window-gelu", {**SIZES, **GROUPED, **axes(1, 2, 1), **WINDOW, "hidden_act": "gelu"},
         composite="qwen2_5_vl"),
    Case("qwen2_5_omni_text", "window-gelu", {**SIZES, **GROUPED, **axes(1, 2, 1), **WINDOW, "hidden_act": "gelu"},
         composite="qwen2_5_omni_thinker"),
    Case("qwen3_vl_text", "biased-tied", {**SIZES, **FULL, **axes(2, 1, 1), "head_dim": 8, "attention_bias": True,
         **TIED}, composite="qwen3_vl"),
    Case("qwen3_omni_moe_text", "not-renormalised-every-second", {**WIDE, **SPARSE, **axes(4, 2, 2),
         "norm_topk_prob": False, "decoder_sparse_step": 2}, composite="qwen3_omni_moe_thinker"),
    Case("qwen3_vl_moe_text", "axes", {**WIDE, **SPARSE, **axes(4, 2, 2)}, composite="qwen3_vl_moe"),
    Case("qwen3_vl_moe_text", "dense-first-tied-experts-as-wide-as-the-stream", {**WIDE, **SPARSE, **axes(4, 2, 2),
         **TIED, "mlp_only_layers": [0], "moe_intermediate_size": 32}, composite="qwen3_vl_moe"),
    Case("cosmos3_edge_text", "biased-tied-full", {**COSMOS, **FULL, **TIED, **axes(2, 1, 1), "head_dim": 8,
         "attention_bias": True, "mlp_bias": True}, composite="cosmos3_edge", adjust=embed_padding),
    Case("deepseek_ocr2_text", "greedy", DEEPSEEK_OCR, composite="deepseek_ocr2"),
    Case("glm4v_text", "tied-whole-heads", {**SIZES, **FULL, **axes(2, 1, 1, partial_rotary_factor=1.0), **TIED},
         composite="glm4v"),
    Case("glm_ocr_text", "wide-heads", {**WIDE, **axes(2, 1, 1, partial_rotary_factor=0.5)}, composite="glm_ocr"),
    Case("glm4v_moe_text", "unbiased-scaled", {**WIDE, **SPARSE_GLM, **axes(2, 1, 1, partial_rotary_factor=0.5),
         "attention_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.7, "n_shared_experts": 2},
         composite="glm4v_moe"),
    Case("paddleocr_vl_text", "biased-untied", {**SIZES, **FULL, **axes(2, 1, 1), "head_dim": 8, "use_bias": True,
         "tie_word_embeddings": False}, composite="paddleocr_vl"),
    Case("emu3_text_model", "yarn", {**SIZES, **GROUPED, **YARN, "pad_token_id": 0}, composite="emu3",
         adjust=embed_padding),
    Case("granite_docling_text", "yarn", {**SIZES, **GROUPED, **YARN, "attention_multiplier": 0.2,
         "residual_multiplier": 0.7}, composite="granite_docling"),
    Case("granite4_vision_text", "yarn", {**SIZES, **GROUPED, **YARN, "attention_multiplier": 0.2,
         "residual_multiplier": 0.7}, composite="granite4_vision"),
    Case("gemma4_unified_text", "shared-kv", {**GEMMA4, "num_kv_shared_layers": 1, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "full_attention"] * 2, "use_double_wide_mlp": True}),
    Case("ernie4_5_vl_moe_text", "axes", {**ERNIE, **axes(1, 1, 2)}, composite="ernie4_5_vl_moe"),
    Case("mllama_text_model", "two-between", MLLAMA, composite="mllama"),
    Case("molmo2_text", "as-olmo2-biased", {**MOLMO, **FULL, "qk_norm_type": "olmo", "norm_after": True,
         "attention_bias": True}, composite="molmo2"),
    Case("molmo2_text", "one-layer-stretched-no-further-tokens-one-kv-gelu", {**MOLMO, **YARN, "num_key_value_heads": 1,
         "rope_scaling_layers": [1], "additional_vocab_size": 0, "hidden_act": "gelu"}, composite="molmo2"),
    Case("hunyuan_vl_text", "biased-untied", {**SIZES, **FULL, **axes(2, 1, 1), "head_dim": 8, "attention_bias": True,
         "tie_word_embeddings": False}, composite="hunyuan_vl"),
    Case("hy_v4_vl_text", "axes-shared-keys", {**HY4, **axes(1, 1, 0), "indexer_types": ["full", "shared"],
         "mlp_layer_types": ["sparse", "dense"]}, composite="hy_v4_vl", adjust=strong_connections),
    Case("muse_glimmer_text", "windows-and-no-rotary", {**MUSE, "num_hidden_layers": 4, "sliding_window": 5},
         composite="muse_glimmer"),
    Case("muse_glimmer_text", "rotary-everywhere-one-kv", {**MUSE, "num_key_value_heads": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "layer_rope_theta": [100.0, 100.0],
         "post_norm_eps": 0.3, "output_multiplier": 0.5}, composite="muse_glimmer"),
]
# fmt: on
