"""The table of architectures: a line per tiny config. `tests/test_families.py` says what each line buys.

Every family has configs that differ in what matters: how heads are grouped, what is tied, which biases there are,
windows shorter than the prompt, how much of a head is rotary and how it is stretched. The norms' eps is large on
purpose: 1e-6 and 1e-5 would give the same logits.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    """A family, what is special about this config, its fields, and the length of prompt at which it matters."""

    family: str
    name: str
    fields: dict[str, Any] = field(hash=False)
    n_prompt: int = 16

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "rms_norm_eps": 0.02}
FULL = {"num_key_value_heads": 4, "rms_norm_eps": 0.05}
GPT2 = {
    "vocab_size": 61,
    "n_positions": 40,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "layer_norm_epsilon": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG_FACTORS = {"short_factor": [1.0, 1.3, 2.0, 2.5], "long_factor": [1.5, 2.0, 4.0, 9.0]}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """A stretched rotary embedding, in the form of checkpoints since transformers 5."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **parameters}}


LINEAR = rope("linear", factor=3.0)
DYNAMIC = rope("dynamic", factor=3.0)
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0)
YARN_MSCALE = rope(
    "yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.2, mscale_all_dim=0.6, truncate=False
)
LONGROPE = {
    **rope("longrope", original_max_position_embeddings=40, **LONG_FACTORS),
    "max_position_embeddings": 80,
}
LONGROPE_PARTIAL = {
    **rope("longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.4], long_factor=[2.0, 7.0]),
    "max_position_embeddings": 80,
    "original_max_position_embeddings": 40,
}

CASES = [
    Case("gpt2", "tied", GPT2),
    Case("gpt2", "untied-narrow-mlp", {**GPT2, "tie_word_embeddings": False, "n_inner": 20}),
    Case("gpt2", "inverse-layer-scale", {**GPT2, "n_layer": 3, "scale_attn_by_inverse_layer_idx": True}),
    Case("gpt2", "unscaled-scores-relu", {**GPT2, "scale_attn_weights": False, "activation_function": "relu"}),
    Case("gpt_neox", "parallel", {**SIZES, "layer_norm_eps": 0.02}),
    Case("gpt_neox", "sequential", {**SIZES, "layer_norm_eps": 0.02, "use_parallel_residual": False}),
    Case("gpt_neox", "all-rotary-no-bias", {**SIZES, "rotary_pct": 1.0, "attention_bias": False}),
    Case("gpt_neox", "half-rotary-tied", {**SIZES, "rotary_pct": 0.5, "tie_word_embeddings": True}),
    Case(
        "gpt_neox",
        "linear",
        {**SIZES, "rope_scaling": {"type": "linear", "factor": 3.0}, "rotary_emb_base": 100},
    ),
    Case("llama", "grouped", {**SIZES, **GROUPED, "rope_theta": 100.0}),
    Case(
        "llama",
        "biased-tied",
        {**SIZES, **FULL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Case("llama", "wide-heads-one-kv", {**SIZES, **GROUPED, "num_key_value_heads": 1, "head_dim": 16}),
    Case("llama", "linear", {**SIZES, **FULL, **LINEAR}),
    Case(
        "llama",
        "old-linear",
        {**SIZES, **FULL, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 50.0},
    ),
    Case("llama", "dynamic", {**SIZES, **GROUPED, **DYNAMIC}, n_prompt=64),
    Case("llama", "llama3", {**SIZES, **GROUPED, **LLAMA3}),
    Case("llama", "yarn", {**SIZES, **GROUPED, **YARN}),
    Case("llama", "longrope", {**SIZES, **GROUPED, **LONGROPE}, n_prompt=64),
    Case("mistral", "window", {**SIZES, **GROUPED, "sliding_window": 5}),
    Case("mistral", "no-window-wide-heads", {**SIZES, **GROUPED, "sliding_window": None, "head_dim": 16}),
    Case(
        "mistral",
        "tied-gelu",
        {**SIZES, **FULL, "sliding_window": 3, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    Case("qwen2", "grouped", {**SIZES, **GROUPED}),
    Case("qwen2", "tied-yarn", {**SIZES, **FULL, **YARN_MSCALE, "tie_word_embeddings": True}),
    Case(
        "qwen2",
        "window-from-layer-1",
        {**SIZES, **GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    Case(
        "qwen2",
        "window-by-layer-types",
        {
            **SIZES,
            **GROUPED,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case("qwen3", "grouped", {**SIZES, **GROUPED, "head_dim": 16}),
    Case(
        "qwen3",
        "biased-tied",
        {**SIZES, **FULL, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    Case(
        "qwen3",
        "window-dynamic",
        {
            **SIZES,
            **GROUPED,
            **DYNAMIC,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
        n_prompt=64,
    ),
    Case(
        "gemma2",
        "grouped",
        {**SIZES, **GROUPED, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 9},
    ),
    Case(
        "gemma2",
        "untied-biased-no-caps",
        {
            **SIZES,
            **GROUPED,
            "head_dim": 8,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 5,
        },
    ),
    Case(
        "gemma2",
        "tight-caps-all-local",
        {
            **SIZES,
            **FULL,
            **LINEAR,
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "layer_types": ["sliding_attention", "sliding_attention"],
        },
    ),
    Case("phi3", "grouped-partial-rotary", {**SIZES, **GROUPED, "partial_rotary_factor": 0.5}),
    Case("phi3", "window-tied", {**SIZES, **FULL, "sliding_window": 5, "tie_word_embeddings": True}),
    Case(
        "phi3",
        "longrope",
        {**SIZES, **GROUPED, **LONGROPE, "original_max_position_embeddings": 40},
        n_prompt=64,
    ),
    Case("phi3", "partial-longrope", {**SIZES, **FULL, **LONGROPE_PARTIAL}, n_prompt=64),
]


@cache
def reference(case: Case) -> nn.Module:
    """A transformers model of this config, its weights drawn so that logits are of order one and attention is uneven.

    Biases and norms are random too. Built once; whoever wants to change it takes a copy.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[case.family](**case.fields)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(len(str(case)))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.3 * noise) if parameter.ndim == 1 else parameter.copy_(0.25 * noise)
    return model
