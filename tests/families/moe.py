"""Decoders whose MLPs are mixtures of experts."""

import torch
from torch import nn

from tests.families._case import FULL, GROUPED, SIZES, YARN, Case, rope

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


def corrected(model: nn.Module) -> None:
    """Corrections of the experts' choice large enough to matter."""
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


# fmt: off
CASES: list[Case] = [
    Case("mixtral", "grouped", {**SIZES, **GROUPED, "num_local_experts": 4}),
    Case("qwen2_moe", "shared", {**QWEN, "shared_expert_intermediate_size": 28}),
    Case("qwen3_moe", "grouped", {**QWEN, "head_dim": 8}),
    Case("olmoe", "clipped-after-norms", {**SIZES, **GROUPED, "num_experts": 4, "clip_qkv": 0.8}),
    Case("olmoe", "loosely-clipped-biased", {**SIZES, **FULL, "num_experts": 4, "clip_qkv": 2.0,
         "attention_bias": True}),
    Case("flex_olmo", "grouped-biased-tied-renormalised", {**SIZES, **GROUPED, **YARN, "num_experts": 8,
         "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True}),
    Case("phimoe", "biased-window", {**SIZES, **FULL, "num_local_experts": 6, "router_jitter_noise": 0.4,
         "attention_bias": True, "lm_head_bias": True, "sliding_window": 5}),
    # transformers keeps the short factors beyond the trained length, so here both sets are the same
    Case("phimoe", "another-attention-factor-beyond-the-trained-length", {**SIZES, **GROUPED, **rope("longrope",
         short_factor=[1.0, 1.3, 2.0, 2.5], long_factor=[1.0, 1.3, 2.0, 2.5], short_mscale=1.1, long_mscale=1.6,
         original_max_position_embeddings=40), "max_position_embeddings": 80, "num_local_experts": 4,
         "router_jitter_noise": 0.1}, n_prompt=64),
    Case("granitemoe", "grouped", {**GRANITE, "residual_multiplier": 0.7, "logits_scaling": 1.6}),
    Case("glm4_moe", "one-group", GLM, adjust=corrected),
    Case("glm4_moe", "grouped-qk-norm-scaled", {**GLM, **FULL, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.5, "use_qk_norm": True, "n_shared_experts": 2, "attention_bias": True,
         "first_k_dense_replace": 0}, adjust=corrected),
    Case("ernie4_5_moe", "tied-first-dense", ERNIE),
    Case("ernie4_5_moe", "biased-one-shared-every-other", {**ERNIE, **FULL, "use_bias": True,
         "moe_num_shared_experts": 1, "moe_layer_interval": 2, "tie_word_embeddings": False, "moe_norm_min": 0.4}),
    Case("ernie4_5_moe", "no-shared-last-dense", {**ERNIE, "moe_num_shared_experts": 0, "moe_layer_start_index": 0,
         "moe_layer_end_index": 1, "moe_k": 3, "tie_word_embeddings": False}),
    Case("gpt_oss", "yarn", OSS),
    Case("gpt_oss", "default-rope-tight-clamps", {**OSS, **FULL, **rope("default"), "swiglu_limit": 0.5,
         "swiglu_alpha": 1.2}),
]
# fmt: on
