"""Attention with options: where transformers deviates, and fields of published checkpoints."""

import copy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from hooked_lm.families import family
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.models.config.tree import DecoderConfig
from tests.close import assert_apart, assert_close
from tests.families import DECODER_CASES, Case, reference
from tests.families._case import SIZES, rope
from tests.families._models import hooked, prompt
from tests.families.attention_options import MIMO

# Fields of the first code of MiMo-V2-Flash, which repeat others.
PUBLISHED = {
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 12,
    "swa_v_head_dim": 8,
    "swa_rope_theta": 10000.0,
    "rope_theta": 5000000.0,
    "partial_rotary_factor": 0.334,
    "attention_chunk_size": 4,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "layernorm_epsilon": 0.02,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": None,
    "sliding_window_size": 4,
}


def by_name(name: str) -> Case:
    return next(case for case in DECODER_CASES if str(case) == name)


def tree_of(model_type: str, fields: dict[str, Any]) -> DecoderConfig:
    return read_config(family(model_type), CONFIG_MAPPING[model_type](**copy.deepcopy(fields)))


@pytest.mark.parametrize("name", ["ministral3-yarn-steep", "llama4_text-chunks-first-second-unturned"])
@torch.no_grad()
def test_factors_of_queries_count_real_tokens(name: str):
    """`Ministral3Model.forward` (modeling_ministral3.py) and `Llama4TextAttention.forward` (modeling_llama4.py) count padding."""
    case, real = by_name(name), torch.ones(1, 12, dtype=torch.long)
    tokens = prompt(case, batch=1, length=12)
    real[:, :4] = 0
    theirs, alone = reference(case), hooked(case)(tokens[:, 4:])
    assert_close(hooked(case)(tokens, attention_mask=real)[:, 4:], alone)
    assert_close(theirs(tokens[:, 4:]).logits, alone)
    assert_apart(theirs(tokens, attention_mask=real).logits[:, 4:], alone)


def test_published_fields_of_mimo_repeat_others():
    assert tree_of("mimo_v2_flash", {**MIMO, **PUBLISHED}) == tree_of("mimo_v2_flash", MIMO)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hybrid_layer_pattern", [0, 0, 1]),
        ("moe_layer_freq", [1, 1, 1]),
        ("swa_num_key_value_heads", 4),
        ("swa_v_head_dim", 12),
        ("swa_rope_theta", 100.0),
        ("add_full_attention_sink_bias", True),
        ("layernorm_epsilon", 1e-5),
        ("n_shared_experts", 1),
    ],
)
def test_published_fields_of_mimo_that_transformers_ignores_are_refused(field: str, value: object):
    with pytest.raises(ValueError, match=f"transformers ignores {field}="):
        tree_of("mimo_v2_flash", {**MIMO, **PUBLISHED, field: value})


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("ministral3", rope("default"), "rope_parameters need llama_4_scaling_beta"),
        ("llama4_text", {"attention_chunk_size": None}, "with attention_chunk_size=None is not supported"),
        ("llama4_text", {"layer_types": ["linear_attention"] * 3}, r"layer_types\[0\]='linear_attention'"),
    ],
)
def test_configs_without_a_meaning_are_refused(model_type: str, fields: dict[str, Any], message: str):
    known = next(case.fields for case in DECODER_CASES if case.family == model_type)
    values = CONFIG_MAPPING[model_type](**copy.deepcopy(known)).to_dict() | fields
    with pytest.raises(ValueError, match=message):
        family(model_type).config(HFConfig(values, {}))


def test_layer_types_of_ministral3_are_refused():
    """transformers warns of them, and has the same attention in all layers."""
    with pytest.raises(ValueError, match="layer_types"):
        tree_of("ministral3", {**SIZES, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 2})
