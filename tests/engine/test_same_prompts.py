"""Clean prompts that are the corrupted ones."""

import warnings

import pytest

from hooked_lm import patching
from hooked_lm.analysis import metrics
from tests.models.toys import toy, words

PROMPT = "w3 w4 w5"


def test_a_sweep_of_the_same_prompts_says_why_all_effects_are_0():
    model = toy(tokenizer=words())
    metric = metrics.loss(PROMPT, model=model)
    with pytest.warns(
        UserWarning, match="the clean and the corrupted prompts are the same, so no cell changes anything"
    ):
        found = patching.sweep(model, PROMPT, PROMPT, metric=metric, by="layer")
    assert not bool(found.effects().values.any())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patching.sweep(model, PROMPT, PROMPT, metric=metric, by="layer", replace_with="zero")
        patching.sweep(model, PROMPT, "w3 w7 w5", metric=metric, by="layer")
