"""Configs that nobody thought of: drawn at random, accepted by transformers, compared in logits and gradients.

`HOOKED_LM_DRAWS=50 python -m pytest tests/test_random_families.py` draws more, from other seeds.
"""

import os

import pytest

from hooked_lm.families import supported
from tests.families import DECODER_CASES
from tests.families._draw import drawn
from tests.families._models import assert_same_gradients, assert_same_logits

FAMILIES = sorted({case.family for case in DECODER_CASES} & set(supported()))
FEW, MANY = 2, 12
EXTRA = range(1000, 1000 + int(os.environ.get("HOOKED_LM_DRAWS", "0")))
SEEDS = [*range(FEW), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FEW, MANY)), *EXTRA]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FAMILIES])
def test_a_config_drawn_at_random(name: str, seed: int):
    case = drawn(name, seed)
    try:
        assert_same_logits(case)
        assert_same_gradients(case)
    except AssertionError as error:
        raise AssertionError(f"{case.fields}: {error}") from error
