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
import transformers
from torch import nn

from hooked_lm import pretrained
from hooked_lm.families import supported
from tests.benchmarks.timing import Figure, seconds
from tests.families import CASES, Case
from tests.families._case import built

N_LAYERS, N_EXPERTS = 12, 8
SIZES = {
    5000: ("vocab_size", "vocab_size_per_layer_input", "src_vocab_size", "tgt_vocab_size"),
    3072: (
        *(
            "intermediate_size",
            "intermediate_size_mlp",
            "n_inner",
            "ffn_dim",
            "ffn_hidden_size",
            "d_ff",
            "dff",
            "hidden_dim",
        ),
        *("encoder_ffn_dim", "decoder_ffn_dim"),
    ),
    1536: ("mamba_d_ssm",),
    1024: (
        *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"),
        *("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"),
    ),
    768: (
        *("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "word_embed_proj_dim", "lru_width"),
        *("prediction_head_size", "output_embedding_size"),
    ),
    512: (
        *("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
        *("max_encoder_position_embeddings", "max_decoder_position_embeddings"),
        *("sliding_window", "attention_window_size", "attention_chunk_size", "keep_window_size"),
    ),
    256: (
        *("kv_lora_rank", "q_lora_rank", "mamba_chunk_size", "chunk_size", "block_size", "window_size"),
        "block_multiple_of",
    ),
    128: (
        "global_head_dim",
        "embedding_size",
        "input_embedding_size",
        "local_attention",
        "original_max_position_embeddings",
    ),
    64: (
        *("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "kv_channels", "index_head_dim", "index_topk"),
        *("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim"),
        *("mamba_d_state", "ssm_state_size", "laurel_rank", "hidden_size_per_layer_input"),
        *("attention_window", "local_radius"),
    ),
    48: ("mamba_dt_rank",),
    32: ("qk_rope_head_dim", "rotary_dim"),
    24: ("mamba_n_heads", "mamba_num_heads"),
    16: ("state_size",),
    12: (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_sliding_attention_heads"),
        *("encoder_attention_heads", "decoder_attention_heads"),
        *("num_encoder_attention_heads", "num_decoder_attention_heads"),
        *("linear_num_heads", "linear_num_value_heads", "index_n_heads"),
    ),
    N_EXPERTS: ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    6: ("linear_num_key_heads",),
    2: ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"),
    1: ("mamba_n_groups", "mamba_ngroups", "n_groups"),
}
SIZE = {name: size for size, names in SIZES.items() for name in names}
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size")
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
# What a family needs besides, because its sizes depend on each other.
BESIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [3, 7, 11]},
    "deepseek_v4": {
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "compress": {"rope_type": "default", "rope_theta": 160000.0, "partial_rotary_factor": 0.5},
        },
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        "sliding_window": 64,
        "q_lora_rank": 256,
        "o_lora_rank": 256,
        "index_head_dim": 64,
        "index_topk": 16,
    },
    "big_bird": {"block_size": 64, "num_random_blocks": 3},
    "bigbird_pegasus": {"block_size": 64, "num_random_blocks": 3},
    "convbert": {"embedding_size": 768, "conv_kernel_size": 9, "num_groups": 1},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 1024, "moe_num_experts": N_EXPERTS, "moe_top_k": 2}},
    "deberta": {"pos_att_type": ["p2c", "c2p"]},
    "deberta-v2": {"pos_att_type": ["p2c", "c2p"]},
    "deepseek_ocr2_text": {"n_group": 4},
    "dots3_note_text": {"head_dim": 96, "swa_head_dim": 96},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [1024, 512],
        "mlp_layer_types": ["dense"] + ["sparse"] * (N_LAYERS - 1),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 8, 16]},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], N_LAYERS // 2]]},
    "gpt_neox_japanese": {"intermediate_multiple_size": 4},
    "jamba": {"mamba_d_state": 16},
    "jetmoe": {"num_key_value_heads": 12},
    "laguna": {"num_attention_heads_per_layer": [12, 16, 12] * 4},
    "longcat_flash": {"head_dim": 32},
    "mamba2": {"num_heads": 24, "head_dim": 64, "state_size": 128},
    "mimo_v2_flash": {"num_key_value_heads": 2, "head_dim": 96},
    "mistral4": {"num_key_value_heads": 12},
    "mobilebert": {
        "embedding_size": 128,
        "intra_bottleneck_size": 192,
        "intermediate_size": 768,
        "num_feedforward_networks": 4,
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 3},
    "olmo_hybrid": {"linear_num_key_heads": 12},
    "pegasus_x": {"block_size": 64, "num_global_tokens": 16},
    "squeezebert": {"embedding_size": 768},
    "zaya": {"router_hidden_size": 128},
    "switch_transformers": {"num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6, "expert_capacity": 64},
    "zamba": {"mamba_d_state": 16},
}
ROUNDS = {(1, 16): 15, (4, 128): 5}


def first_case(family: str) -> Case:
    """The first line of a family in the table of architectures."""
    return next(case for case in CASES if case.family == family)


def real_size(case: Case) -> dict[str, Any]:
    """The fields of a tiny config, at the size of a small real model."""
    default = transformers.CONFIG_MAPPING[case.family]().to_dict()
    heads = next((case.fields[name] for name in SIZES[12] if name in case.fields), 1)
    d_head = case.fields.get("head_dim") or case.fields.get("hidden_size", 0) // heads
    fields = {name: enlarged(name, value, case.fields, default, d_head) for name, value in case.fields.items()}
    if is_mixture(case.fields) and not any(name in fields for name in EXPERT_WIDTHS):
        fields |= {name: 1024 for name in ("intermediate_size", "d_ff") if name in fields}
    return {**fields, **BESIDES.get(case.family, {})}


def enlarged(name: str, value: Any, fields: dict[str, Any], default: dict[str, Any], d_head: int) -> Any:
    """The value of a field among others; `default` has those of an empty config, `d_head` is the width of the tiny heads."""
    name = name.removeprefix("swa_")
    if isinstance(value, dict):
        return {part: enlarged(part, entry, value, {}, d_head) for part, entry in value.items()}
    if name in LAYERS:
        return N_LAYERS
    if name in KEY_VALUE_HEADS:
        return 12 if any(fields[other] == value for other in fields if other.removeprefix("swa_") in SIZES[12]) else 4
    if name == "mrope_section":  # numbers of pairs
        return [n * 64 // d_head for n in value]
    if isinstance(value, (list, tuple)):
        n_layers = next((fields[name] for name in LAYERS if name in fields), None)
        usual = default.get(name)
        if len(value) != n_layers or (isinstance(usual, list) and len(usual) == n_layers):  # not a value per layer
            return value
        return [SIZE.get(name, entry) for entry in (list(value) * N_LAYERS)[:N_LAYERS]]
    return value if value is None else SIZE.get(name, value)


def is_mixture(fields: dict[str, Any]) -> bool:
    """Whether a model with these fields has experts."""
    return any(
        name in SIZES[N_EXPERTS] or (isinstance(part, dict) and is_mixture(part)) for name, part in fields.items()
    )


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
    bound = 1.0 if is_mixture(case.fields) else 1.05
    mine, other = (statistics.median(column) for column in zip(*times[fastest], strict=True))
    others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != fastest)
    detail = f"{mine * 1e3:.1f} / {other * 1e3:.1f} ms" + (f"; against {others}" if others else "")
    return Figure(f"{case.family} {batch}x{pos}", f"HF {fastest}", ratios[fastest], bound, detail)


def family_figures(names: list[str]) -> list[Figure]:
    """Of the families that are named, or of all."""
    figures = []
    for name in names or supported():
        case = first_case(name)
        ours, theirs = models(case)
        choices = ways(theirs)
        figures += [forward_figure(case, ours, theirs, choices, *size) for size in ROUNDS]
    return figures
