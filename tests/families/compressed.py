"""Decoders whose far keys pool several tokens."""

import torch
from torch import nn

from tests.families._case import SIZES, Case
from tests.families.streams import strong_connections


def hashed(model: nn.Module) -> None:
    """As `strong_connections`; uneven attention, and experts that differ between token ids."""
    strong_connections(model)
    for name, parameter in model.named_parameters():
        if name.endswith("self_attn.sinks"):
            parameter.sub_(1.0)
        if name.endswith("self_attn.kv_norm.weight"):
            parameter.mul_(2.0)
    generator = torch.Generator().manual_seed(4)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            n_experts = model.config.n_routed_experts
            rows = [torch.randperm(n_experts, generator=generator)[: buffer.shape[1]] for _ in range(len(buffer))]
            buffer.copy_(torch.stack(rows))


def rotary(compress: dict[str, object], **main: object) -> dict[str, object]:
    """Rotary of layers with and without pooled keys, on 4 of 12 features."""
    both = {
        "main": {"rope_type": "default", "rope_theta": 100.0, **main},
        "compress": {"rope_theta": 300.0, **compress},
    }
    return {"rope_parameters": {kind: {**given, "partial_rotary_factor": 1 / 3} for kind, given in both.items()}}


def layers(*kinds: str) -> dict[str, list[str]]:
    """The attention and the MLP of each layer, with one letter each: sliding, chosen (CSA) or heavily compressed; hash or not."""
    names = {"s": "sliding_attention", "c": "compressed_sparse_attention", "h": "heavily_compressed_attention"}
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": [names[kind[0]] for kind in kinds],
        "mlp_layer_types": ["hash_moe" if kind.endswith("#") else "moe" for kind in kinds],
    }


def rates(chosen: int, heavy: int) -> dict[str, dict[str, int]]:
    """How many tokens a block has."""
    return {"compress_rates": {"compressed_sparse_attention": chosen, "heavily_compressed_attention": heavy}}


V4 = {
    **{name: value for name, value in SIZES.items() if name != "intermediate_size"},
    **rotary({"rope_type": "default"}),
    "hidden_size": 24,
    "rms_norm_eps": 0.02,
    "head_dim": 12,
    "q_lora_rank": 10,
    "o_groups": 2,
    "o_lora_rank": 7,
    "sliding_window": 4,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 2,
    "moe_intermediate_size": 14,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.3,
    "hc_mult": 3,
    "hc_eps": 0.03,
    "hc_sinkhorn_iters": 3,
    "swiglu_limit": 0.5,
}

# fmt: off
CASES = [
    Case("deepseek_v4", "three-kinds", {**V4, **layers("s#", "c", "h"), **rates(2, 4)}, adjust=hashed),
    Case(
        "deepseek_v4",
        "yarn-biased-tied-sigmoid",
        {
            **V4,
            **layers("c#", "h"),
            **rates(3, 2),
            **rotary(
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10, "attention_factor": 0.8}
            ),
            "hc_mult": 2,
            "hc_eps": 0.1,
            "hc_sinkhorn_iters": 1,
            "sliding_window": 3,
            "swiglu_limit": 1.0,
            "index_topk": 1,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "scoring_func": "sigmoid",
            "o_groups": 4,
        },
        adjust=hashed,
    ),
    Case("deepseek_v4", "no-ids-gelu-linear", {**V4, **layers("h", "s"), **rates(4, 3), **rotary({"rope_type": "linear",
         "factor": 3.0}, rope_theta=30.0), "hidden_act": "gelu", "o_groups": 1, "num_experts_per_tok": 3},
         adjust=hashed),
]
# fmt: on
