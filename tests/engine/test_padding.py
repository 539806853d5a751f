"""Ids with padding in front, and words without their space, are warned of by name."""

import pytest
import torch

from hooked_lm import HookedTransformer, patching
from tests.close import assert_apart


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def first(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, -1, 5]


def test_padding_in_front_of_some_ids_is_warned_of(model: HookedTransformer) -> None:
    texts = ["Mary went home", "John"]
    left = model.to_tokens(texts, padding_side="left")
    with pytest.warns(UserWarning, match=r"prompts: rows \[1\] of 2 begin with more pad tokens \(0\) than the others"):
        patching.ablate(model, left, "layers", metric=first, progress=False)
    right = model.to_tokens(texts, padding_side="right")  # no token sees it before the end
    patching.ablate(model, right, "layers", metric=first, progress=False)


def test_a_word_without_its_space_is_warned_of(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache("When Mary and John went")
    parts = cache.decompose_resid()
    with pytest.warns(UserWarning, match="'Mary' has no leading space, .* give ' Mary', or an id"):
        bare = cache.logit_attrs(parts, "Mary")
    assert torch.equal(bare, cache.logit_attrs(parts, model.to_single_token("Mary")))
    assert_apart(bare, cache.logit_attrs(parts, " Mary"))
