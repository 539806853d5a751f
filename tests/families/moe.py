"""Decoders whose MLPs are mixtures of experts."""

import torch
from torch import nn

from tests.families._case import FULL, GROUPED, LINEAR, LLAMA3, SIZES, YARN, Case, rope

SIZES = {**SIZES, "num_experts_per_tok": 2}
QWEN = {**SIZES, **GROUPED, "num_experts": 6, "moe_intermediate_size": 20}
GLM = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
ERNIE = {
    **SIZES,
    **GROUPED,
    "num_hidden_layers": 3,
    "moe_num_experts": 6,
    "moe_intermediate_size": 20,
    "moe_k": 2,
}
del ERNIE["num_experts_per_tok"]
GRANITE = {**SIZES, **GROUPED, "num_local_experts": 5, "attention_multiplier": 0.3}
OSS = {**SIZES, **GROUPED, "num_local_experts": 4, "head_dim": 8, "sliding_window": 5}
PHI_LONG = rope(
    "longrope",
    short_factor=[1.0, 1.3, 2.0, 2.5],
    long_factor=[1.5, 2.0, 4.0, 9.0],
    short_mscale=1.2,
    long_mscale=1.2,
    original_max_position_embeddings=32,
)


def corrected(model: nn.Module) -> None:
    """Corrections of the experts' choice large enough to matter."""
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


CASES: list[Case] = [
    Case("mixtral", "grouped", {**SIZES, **GROUPED, "num_local_experts": 4}),
    Case("mixtral", "one-expert-each-window", {**SIZES, **FULL, "num_experts_per_tok": 1, "sliding_window": 5}),
    Case("mixtral", "tied-linear", {**SIZES, **GROUPED, **LINEAR, "num_local_experts": 3, "tie_word_embeddings": True}),
    Case("qwen2_moe", "shared", {**QWEN, "shared_expert_intermediate_size": 28}),
    Case(
        "qwen2_moe",
        "every-other-dense-renormalised",
        {
            **QWEN,
            **FULL,
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 12,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    Case(
        "qwen2_moe",
        "window-one-dense-tied",
        {
            **QWEN,
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 12,
            "tie_word_embeddings": True,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    Case("qwen3_moe", "grouped", {**QWEN, "head_dim": 8}),
    Case(
        "qwen3_moe",
        "renormalised-biased-yarn",
        {**QWEN, **FULL, **YARN, "norm_topk_prob": True, "attention_bias": True},
    ),
    Case(
        "qwen3_moe",
        "wide-heads-dense-layers-window-tied",
        {
            **QWEN,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 4,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 3,
        },
    ),
    Case("olmoe", "full", {**SIZES, **FULL, "num_experts": 6}),
    Case("olmoe", "clipped-after-norms", {**SIZES, **GROUPED, "num_experts": 4, "clip_qkv": 0.8}),
    Case(
        "olmoe", "loosely-clipped-biased", {**SIZES, **FULL, "num_experts": 4, "clip_qkv": 2.0, "attention_bias": True}
    ),
    Case("olmoe", "grouped-renormalised", {**SIZES, **GROUPED, "num_experts": 4, "norm_topk_prob": True}),
    Case(
        "olmoe",
        "biased-tied-three-of-eight",
        {
            **SIZES,
            **FULL,
            **LLAMA3,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Case("flex_olmo", "full", {**SIZES, **FULL, "num_experts": 6}),
    Case(
        "flex_olmo",
        "grouped-biased-tied-renormalised",
        {
            **SIZES,
            **GROUPED,
            **YARN,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Case("phimoe", "grouped", {**SIZES, **GROUPED, "num_local_experts": 4, "router_jitter_noise": 0.1}),
    Case(
        "phimoe",
        "biased-window",
        {
            **SIZES,
            **FULL,
            "num_local_experts": 6,
            "router_jitter_noise": 0.4,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 5,
        },
    ),
    Case(
        "phimoe",
        "longrope-tied",
        {
            **SIZES,
            **GROUPED,
            **PHI_LONG,
            "num_local_experts": 4,
            "router_jitter_noise": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    # transformers keeps the short factors beyond the trained length, so here both sets are the same
    Case(
        "phimoe",
        "another-attention-factor-beyond-the-trained-length",
        {
            **SIZES,
            **GROUPED,
            **rope(
                "longrope",
                short_factor=[1.0, 1.3, 2.0, 2.5],
                long_factor=[1.0, 1.3, 2.0, 2.5],
                short_mscale=1.1,
                long_mscale=1.6,
                original_max_position_embeddings=40,
            ),
            "max_position_embeddings": 80,
            "num_local_experts": 4,
            "router_jitter_noise": 0.1,
        },
        n_prompt=64,
    ),
    Case("granitemoe", "grouped", {**GRANITE, "residual_multiplier": 0.7, "logits_scaling": 1.6}),
    Case(
        "granitemoe",
        "tied-embedding-multiplier",
        {**GRANITE, **FULL, "embedding_multiplier": 3.0, "tie_word_embeddings": True, "num_experts_per_tok": 3},
    ),
    Case("granitemoe", "biased-linear", {**GRANITE, **LINEAR, "attention_bias": True, "attention_multiplier": 0.5}),
    Case("glm4_moe", "one-group", GLM, adjust=corrected),
    Case(
        "glm4_moe",
        "grouped-qk-norm-scaled",
        {
            **GLM,
            **FULL,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "n_shared_experts": 2,
            "attention_bias": True,
            "first_k_dense_replace": 0,
        },
        adjust=corrected,
    ),
    Case(
        "glm4_moe",
        "not-renormalised-tied-two-dense",
        {
            **GLM,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "tie_word_embeddings": True,
            **rope("default", partial_rotary_factor=1.0),
        },
        adjust=corrected,
    ),
    Case("ernie4_5_moe", "tied-first-dense", ERNIE),
    Case(
        "ernie4_5_moe",
        "biased-one-shared-every-other",
        {
            **ERNIE,
            **FULL,
            "use_bias": True,
            "moe_num_shared_experts": 1,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
            "moe_norm_min": 0.4,
        },
    ),
    Case(
        "ernie4_5_moe",
        "no-shared-last-dense",
        {
            **ERNIE,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "moe_k": 3,
            "tie_word_embeddings": False,
        },
    ),
    Case("gpt_oss", "yarn", OSS),
    Case(
        "gpt_oss",
        "default-rope-tight-clamps",
        {**OSS, **FULL, **rope("default"), "swiglu_limit": 0.5, "swiglu_alpha": 1.2},
    ),
    Case(
        "gpt_oss",
        "unbiased-attention-wide-heads-tied",
        {
            **OSS,
            "num_hidden_layers": 3,
            "attention_bias": False,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
]
