"""Attention to keys that an indexer chooses: fewer than the prompt has, or all.

With few heads of the indexer a key may have a score of exactly zero from all of them, and ties are chosen at random.
"""

from torch import nn

from tests.families._case import Case, rope
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

# Its default gives each layer an indexer.
GLM = {**DSA, "num_hidden_layers": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}

CASES = [
    Case("deepseek_v32", "three-keys", {**DSA, "rope_theta": 100.0}, adjust=balanced),
    Case(
        "deepseek_v32",
        "two-keys-yarn-biased-tied",
        {
            **DSA,
            **YARN,
            "index_topk": 2,
            "index_n_heads": 20,
            "index_head_dim": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "mlp_layer_types": ["sparse", "dense"],
            "n_group": 1,
            "topk_group": 1,
        },
        adjust=balanced,
    ),
    Case(
        "deepseek_v32",
        "gelu-not-renormalised",
        {**DSA, "hidden_act": "gelu", "norm_topk_prob": False, "v_head_dim": 8, "n_shared_experts": 1},
        adjust=balanced,
    ),
    Case("glm_moe_dsa", "an-indexer-per-layer", {**GLM, "num_hidden_layers": 2}, adjust=balanced),
    Case(
        "glm_moe_dsa",
        "shared-twice-biased-tied",
        {
            **GLM,
            "indexer_types": ["full", "shared", "shared", "full"],
            "index_topk": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
        },
        adjust=balanced,
    ),
    Case(
        "glm_moe_dsa",
        "shared-by-frequency-not-renormalised",
        {
            **GLM,
            "num_hidden_layers": 3,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 1,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "v_head_dim": 8,
        },
        adjust=balanced,
    ),
]
