"""Stretched rotary embeddings at lengths that no line of the table of architectures has."""

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.embeddings.rotary_scaling import YarnScaling
from tests.close import assert_close


@pytest.mark.parametrize("trained", [3, 7, 4096, 10**9])
def test_yarn_where_all_pairs_turn_slowly_or_fast(trained: int) -> None:
    """Shorter than one turn of the fastest pair, or longer than many turns of the slowest, the bounds of the ramp swap."""
    stretch = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": trained}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=stretch)
    expected, temperature = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    found, factor = YarnScaling(4.0, trained)(Rotary(64, 500.0), 20)
    assert_close(found, expected)
    assert factor == temperature
