"""Stretched rotary embeddings at lengths that no line of the table of architectures has."""

from typing import Any

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hooked_lm.components.embeddings.rotary import Rotary, Scaling
from hooked_lm.components.embeddings.rotary_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from tests.close import assert_apart, assert_close


@pytest.mark.parametrize("trained", [3, 7, 4096, 10**9])
def test_yarn_where_all_pairs_turn_slowly_or_fast(trained: int) -> None:
    """Shorter than one turn of the fastest pair, or longer than many turns of the slowest, the bounds of the ramp swap."""
    stretch = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": trained}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=stretch)
    expected, temperature = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    found, factor = YarnScaling(4.0, trained)(Rotary(64, 500.0), 20)
    assert_close(found, expected)
    assert factor == temperature


SCALINGS: dict[str, tuple[Scaling, dict[str, Any]]] = {
    "linear": (LinearScaling(3.0), {"factor": 3.0}),
    "dynamic": (DynamicScaling(2.0, 40), {"factor": 2.0}),
    "llama3": (
        Llama3Scaling(4.0, 1.0, 4.0, 40),
        {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40},
    ),
    "yarn": (YarnScaling(4.0, 40), {"factor": 4.0, "original_max_position_embeddings": 40}),
}


@pytest.mark.every_parameter
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("n_pos", [20, 60], ids=["trained", "longer"])
def test_scalings_are_those_of_transformers(kind: str, n_pos: int) -> None:
    scaling, fields = SCALINGS[kind]
    stretch = {"rope_type": kind, "rope_theta": 500.0, **fields}
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=40, rope_parameters=stretch)
    expected, temperature = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=n_pos)
    found, factor = scaling(Rotary(16, 500.0), n_pos)
    assert_close(found, expected)
    assert factor == temperature
    if n_pos > 40:
        assert_apart(found, Rotary(16, 500.0).base_frequencies())
