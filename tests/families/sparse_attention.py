"""Attention to keys that an indexer chooses: fewer than the prompt has, or all.

With few heads of the indexer a key may have a score of exactly zero from all of them, and ties are chosen at random.
"""

from torch import nn

from tests.families._case import SIZES, Case, rope
from tests.families.latent import DEEPSEEK
from tests.families.moe import corrected


def balanced(model: nn.Module) -> None:
    """As `corrected`; biases of the indexer's keys as large as the keys, so that the scale of a key decides too."""
    corrected(model)
    for name, parameter in model.named_parameters():
        if name.endswith("indexer.k_norm.bias"):
            parameter.mul_(4)


INDEXER = {"index_topk": 3, "index_n_heads": 16, "index_head_dim": 12}
DSA = {**DEEPSEEK, **INDEXER}
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=10, mscale=0.8, mscale_all_dim=0.5)


def published(model: nn.Module) -> None:
    """As `corrected`; without the weights of identity experts, which published files lack and nothing uses."""
    corrected(model)
    for module in model.modules():
        if type(module).__name__ == "LongcatFlashExperts":
            module.gate_up_proj = nn.Parameter(module.gate_up_proj[: module.num_routed_experts].clone())


LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps")
LONGCAT = {
    **{name: SIZES[name] for name in SIZES if name not in ("intermediate_size", "num_hidden_layers")},
    **{name: DEEPSEEK[name] for name in LATENT},
    "num_layers": 2,
    "head_dim": 4,
    "ffn_hidden_size": 40,
    "expert_ffn_hidden_size": 12,
    "n_routed_experts": 5,
    "zero_expert_num": 3,
    "moe_topk": 3,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}

DOTS = {
    **{name: value for name, value in DSA.items() if name != "first_k_dense_replace"},
    "num_hidden_layers": 3,
    "head_dim": 12,
    "shared_experts_intermediate_size": 10,
    "layer_types": ["indexed_attention", "sliding_attention", "full_attention"],
    "use_dsa": None,
    "sliding_window": 5,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 10,
    "swa_head_dim": 12,
    "swa_qk_nope_head_dim": 6,
    "swa_v_head_dim": 8,
}

AXK = {**{name: value for name, value in DSA.items() if name != "first_k_dense_replace"}, "gated_norm_rank": 5}

# Its default gives each layer an indexer.
GLM = {**DSA, "num_hidden_layers": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}

# fmt: off
CASES = [
    Case("deepseek_v32", "two-keys-yarn-biased-tied", {**DSA, **YARN, "index_topk": 2, "index_n_heads": 20,
         "index_head_dim": 4, "attention_bias": True, "tie_word_embeddings": True, "mlp_layer_types": ["sparse",
         "dense"], "n_group": 1, "topk_group": 1}, adjust=balanced),
    Case("glm_moe_dsa", "an-indexer-per-layer", {**GLM, "num_hidden_layers": 2}, adjust=balanced),
    Case("glm_moe_dsa", "shared-twice-biased-tied", {**GLM, "indexer_types": ["full", "shared", "shared", "full"],
         "index_topk": 2, "attention_bias": True, "tie_word_embeddings": True, "mlp_layer_types": ["sparse", "dense",
         "sparse", "dense"]}, adjust=balanced),
    Case("glm_moe_dsa", "shared-by-frequency-not-renormalised", {**GLM, "num_hidden_layers": 3, "index_topk_freq": 2,
         "index_skip_topk_offset": 1, "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "v_head_dim": 8},
         adjust=balanced),
    Case("longcat_flash", "three-identities", LONGCAT, adjust=published),
    Case("longcat_flash", "no-identities-biased-tied", {**LONGCAT, "zero_expert_num": 0, "attention_bias": True,
         "tie_word_embeddings": True, "v_head_dim": 8}, adjust=published),
    Case("dots3_note_text", "three-kinds", DOTS, adjust=balanced),
    Case("axk2", "groups", {**AXK, "rope_theta": 100.0}, adjust=balanced),
    Case("axk2", "no-groups-yarn-biased-tied", {**AXK, **YARN, "n_group": None, "topk_group": None,
         "attention_bias": True, "tie_word_embeddings": True}, adjust=balanced),
]
# fmt: on
