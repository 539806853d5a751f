"""Configs that nobody thought of: drawn at random, accepted by transformers, compared in logits and gradients.

`HOOKED_LM_DRAWS=50 python -m pytest tests/families/test_random_decoders.py` draws more, from other seeds.
"""

import os
from dataclasses import replace

import pytest

from hooked_lm.families import family, supported
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from tests.core import marks
from tests.families import DECODER_CASES
from tests.families._draw import drawn
from tests.families._models import assert_same_gradients, assert_same_logits, hooked

FAMILIES = sorted({case.family for case in DECODER_CASES} & set(supported()))
FEW, MANY = 2, 4
EXTRA = range(1000, 1000 + int(os.environ.get("HOOKED_LM_DRAWS", "0")))
SEEDS = [*range(FEW), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FEW, MANY)), *EXTRA]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FAMILIES])
def test_a_config_drawn_at_random(name: str, seed: int):
    case = drawn(name, seed)
    try:
        assert_same_logits(case)
        assert_same_gradients(case)
    except AssertionError as error:
        raise AssertionError(f"{case.fields}: {error}") from error


def test_draws_are_new_and_repeat():
    configs = [drawn("llama", seed).fields for seed in range(4)]
    assert configs == [drawn("llama", seed).fields for seed in range(4)]
    known = [case.fields for case in DECODER_CASES if case.family == "llama"]
    assert all(config not in known and configs.count(config) == 1 for config in configs)


def test_a_family_that_misreads_a_field_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """One of the draws has another activation, which is overlooked here; no line of the table has."""
    assert all("hidden_act" not in case.fields for case in DECODER_CASES if case.family == "llama")
    right = family("llama").config

    def always_silu(hf: HFConfig) -> DecoderConfig:
        tree = right(hf)
        mlps = [replace(block.mlp, act_fn="silu") for block in tree.blocks]
        return replace(tree, blocks=tuple(replace(b, mlp=mlp) for b, mlp in zip(tree.blocks, mlps, strict=True)))

    def compare() -> None:
        for seed in range(12):
            assert_same_logits(drawn("llama", seed))

    hooked.cache_clear()
    monkeypatch.setattr(family("llama"), "config", always_silu)
    with pytest.raises(AssertionError, match="logits differ"):
        compare()
    hooked.cache_clear()
