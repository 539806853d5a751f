"""Weights that nobody filled: a model with them does not run, and a fresh one has none."""

import copy
import re
from dataclasses import replace

import pytest
import torch

from hooked_lm import HookedTransformer
from tests.close import assert_apart, assert_close
from tests.core import CORE, IMAGES
from tests.families import CASES, VISION_CASES
from tests.families._answers import ours
from tests.models.toys import ids, toy

UNFILLED = (
    r"27 weights were never filled, such as 'embed.W_E': the config has init_weights=False.*untrained.*load_state_dict"
)


def test_the_config_of_a_loaded_model_gives_no_weights() -> None:
    """Not what lay in memory: numbers of any size, with which it would run."""
    model = HookedTransformer.from_pretrained("demo")
    made = HookedTransformer(model.cfg)
    assert made.W_E.isnan().all()
    for run in (lambda: made(ids() % 60), lambda: made.run_with_cache("John"), lambda: made.generate("John", 1)):
        with pytest.raises(ValueError, match=UNFILLED):
            run()
    made.load_state_dict(model.state_dict())
    assert_close(made("John"), model("John"))
    made = HookedTransformer(model.cfg)
    with torch.no_grad():
        for weight, given in zip(made.parameters(), model.parameters(), strict=True):
            weight.copy_(given)  # in any other way
    assert_close(copy.deepcopy(made)("John"), model("John"))
    made = HookedTransformer(model.cfg)
    made.init_weights()
    assert made("John").isfinite().all()


def test_some_weights_are_not_all() -> None:
    model = toy()
    made = type(model)(replace(model.cfg, init_weights=False))
    made.load_state_dict({"embed.W_E": model.W_E}, strict=False)
    with pytest.raises(ValueError, match=r"20 weights were never filled, such as 'pos_embed\.W_pos'"):
        made(ids())


@pytest.mark.parametrize("family", sorted({*CORE, *IMAGES, "gemma3n_text", "llava_next", "t5gemma2"}))
def test_untrained_twins_have_no_number_of_the_model_and_none_unfilled(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next((case for case in (*CASES, *VISION_CASES) if case.family == family), None)
    if case is None:
        pytest.fail(f"the table has no line of {family}")
    model = ours(case)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # memory that nobody fills is NaN
    try:
        twin, again, other = model.untrained(1), model.untrained(1), model.untrained(2)
    finally:
        torch.use_deterministic_algorithms(False)
    ours_, drawn = dict(model.named_parameters()), dict(twin.named_parameters())
    assert drawn.keys() == ours_.keys()
    assert not any(weight.isnan().any() for weight in drawn.values())
    for name, weight in again.named_parameters():
        assert_close(weight, drawn[name])
    name = next(name for name in drawn if re.search(r"\.0\..*W_", name))
    assert_apart(drawn[name], ours_[name])
    assert_apart(drawn[name], dict(other.named_parameters())[name])
    assert (twin.tokenizer, twin.cfg.processed, twin.device) == (model.tokenizer, (), model.device)
