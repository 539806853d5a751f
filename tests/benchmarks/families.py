"""The unhooked forward pass of every family, against transformers' fastest attention on this machine.

python -m tests.benchmarks families [model_type ...]

A model has the structure of its family's first line in the table of tests/families, at 12 layers of width 768 and with a small
vocabulary. Without names all families are timed, one model at a time: about half a minute each.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hooked_lm import pretrained
from hooked_lm.families import supported
from tests.benchmarks.timing import Figure, seconds
from tests.families import CASES, Case
from tests.families._case import built

N_LAYERS, N_EXPERTS = 12, 8
SIZES = {
    5000: ("vocab_size", "vocab_size_per_layer_input"),
    768: ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "lru_width", "kv_lora_rank"),
    12: ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    3072: (
        *("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "dff", "hidden_dim"),
        *("encoder_ffn_dim", "decoder_ffn_dim"),
    ),
    512: ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "sliding_window", "attention_window_size"),
    64: ("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim"),
    32: ("qk_rope_head_dim", "rotary_dim"),
    N_EXPERTS: ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    2: ("num_experts_per_tok", "moe_k", "moe_topk"),
    1024: ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
}
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("encoder_layers", "decoder_layers", "num_decoder_layers"),
)
# What a family needs besides, because its sizes depend on each other.
BESIDES: dict[str, dict[str, Any]] = {
    "bamba": {
        "mamba_n_heads": 24,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 256,
        "attn_layer_indices": [3, 7, 11],
    },
    "big_bird": {"block_size": 64, "num_random_blocks": 3},
    "bigbird_pegasus": {"block_size": 64, "num_random_blocks": 3},
    "convbert": {"embedding_size": 768, "conv_kernel_size": 9, "num_groups": 1},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [1024, 512],
        "mlp_layer_types": ["dense"] + ["sparse"] * (N_LAYERS - 1),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 8, 16]},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], N_LAYERS // 2]], "window_size": 256},
    "gpt_neox_japanese": {"intermediate_multiple_size": 4},
    "kimi_linear": {"linear_num_heads": 12, "linear_head_dim": 64},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 24, "head_dim": 64, "n_groups": 1, "state_size": 128, "chunk_size": 256},
    "minimax": {"block_size": 256},
    "mobilebert": {
        "embedding_size": 128,
        "intra_bottleneck_size": 192,
        "intermediate_size": 768,
        "num_feedforward_networks": 4,
    },
    "qwen3_next": {
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "squeezebert": {"embedding_size": 768},
    "zaya": {"router_hidden_size": 128},
    "switch_transformers": {"num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6, "expert_capacity": 64},
}
ROUNDS = {(1, 16): 15, (4, 128): 5}


def real_size(case: Case) -> dict[str, Any]:
    """The fields of a tiny config, at the size of a small real model."""
    fields = dict(case.fields)
    size = {name: size for size, names in SIZES.items() for name in names}
    n_layers = next((fields[name] for name in LAYERS if name in fields), None)
    heads = next((fields[name] for name in SIZES[12] if name in fields), None)
    for name, value in fields.items():
        if name in LAYERS:
            fields[name] = N_LAYERS
        elif name in KEY_VALUE_HEADS:
            fields[name] = 12 if value == heads else 4
        elif isinstance(value, (list, tuple)) and len(value) == n_layers:
            fields[name] = (list(value) * N_LAYERS)[:N_LAYERS]
        elif name in size and value is not None:
            fields[name] = size[name]
    if is_mixture(case) and "moe_intermediate_size" not in fields:
        fields |= {name: 1024 for name in ("intermediate_size", "d_ff") if name in fields}
    return {**fields, **BESIDES.get(case.family, {})}


def is_mixture(case: Case) -> bool:
    return any(name in case.fields for name in SIZES[N_EXPERTS])


def models(case: Case) -> tuple[Any, nn.Module]:
    """Ours and that of transformers, with the same random weights, both copied into memory."""
    torch.manual_seed(0)
    theirs = built(replace(case, fields=real_size(case))).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        return pretrained.from_pretrained_no_processing(directory, mmap=False), theirs


def ways(theirs: nn.Module) -> dict[str, Callable[[], None]]:
    """What can be chosen in transformers, by name: attention in steps or fused; experts as it comes or one by one."""

    def choose(attention: str, experts: str | None = None) -> Callable[[], None]:
        def now() -> None:
            theirs.set_attn_implementation(attention)
            if experts is not None:
                theirs.set_experts_implementation(experts)

        return now

    found: dict[str, Callable[[], None]] = {}
    default = getattr(theirs.config, "_experts_implementation", None)
    expert_ways = [default, "eager"] if theirs._can_set_experts_implementation() else [None]
    for attention in ("eager", "sdpa"):
        for experts in dict.fromkeys(expert_ways):
            way = choose(attention, experts)
            try:
                way()
            except ValueError:  # not every architecture has a fused attention
                continue
            found[attention if experts is None else f"{attention}, experts {experts}"] = way
    return found


@torch.no_grad()
def forward_figure(
    case: Case, ours: Any, theirs: nn.Module, choices: dict[str, Callable[[], None]], batch: int, pos: int
) -> Figure:
    """Ours against each way of transformers in turn; the figure is the ratio to the fastest.

    Of a mixture it is the fastest whose experts run one by one, as ours do.
    """
    tokens = torch.randint(5000, (batch, pos))
    inputs = (tokens, tokens) if theirs.config.is_encoder_decoder else (tokens,)
    named = dict(zip(("input_ids", "decoder_input_ids"), inputs, strict=False))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in choices}
    for turn in range(ROUNDS[batch, pos] + 1):
        for name, choose in choices.items():
            choose()
            pair = seconds(lambda: ours(*inputs)), seconds(lambda: theirs(**named, use_cache=False))
            if turn:  # the first round warms up
                times[name].append(pair)
    ratios = {name: statistics.median(a / b for a, b in times[name]) for name in choices}
    alike = [name for name in ratios if name.endswith("experts eager")] or list(ratios)
    fastest = max(alike, key=ratios.__getitem__)
    bound = 1.0 if is_mixture(case) else 1.05
    mine, other = (statistics.median(column) for column in zip(*times[fastest], strict=True))
    others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != fastest)
    detail = f"{mine * 1e3:.1f} / {other * 1e3:.1f} ms" + (f"; against {others}" if others else "")
    return Figure(f"{case.family} {batch}x{pos}", f"HF {fastest}", ratios[fastest], bound, detail)


def family_figures(names: list[str]) -> list[Figure]:
    """Of the families that are named, or of all."""
    figures = []
    for name in names or supported():
        case = next(case for case in CASES if case.family == name)
        ours, theirs = models(case)
        choices = ways(theirs)
        figures += [forward_figure(case, ours, theirs, choices, *size) for size in ROUNDS]
    return figures
