"""Small sets of texts on the hub: which is asked for, and what a model does with its own."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.hub.datasets import get_dataset

TEXTS = [{"text": "The capital of France is Paris"}, {"text": "Mary went home"}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of the package `datasets`, which answers with two texts."""
    calls: list[Any] = []

    def load_dataset(name: str, **kwargs: Any) -> list[dict[str, str]]:
        calls.append((name, kwargs))
        return TEXTS

    monkeypatch.setitem(
        sys.modules,
        "datasets",
        SimpleNamespace(load_dataset=load_dataset, config=SimpleNamespace(HF_HUB_OFFLINE=False)),
    )
    return calls


def test_a_name_is_a_set_on_the_hub(asked: list[Any]) -> None:
    assert get_dataset("owt", cache_dir="here") is TEXTS
    assert asked == [("stas/openwebtext-10k", {"split": "train", "cache_dir": "here"})]
    with pytest.raises(ValueError, match=r"'thepile'.*openwebtext, owt, pile"):
        get_dataset("thepile")


def test_a_model_has_the_set_nearest_to_its_training(asked: list[Any]) -> None:
    model = HookedTransformer.from_pretrained("demo")
    texts = {model.sample_datapoint() for _ in range(20)}
    assert texts == {row["text"] for row in TEXTS}
    assert asked == [("stas/openwebtext-10k", {"split": "train"})]  # once
    torch.manual_seed(0)
    tokens = model.sample_datapoint(tokenize=True)
    assert any(torch.equal(tokens, model.to_tokens(text)) for text in texts)
    model.dataset = [{"text": "of my own"}]
    assert model.sample_datapoint() == "of my own"


def test_no_set_is_known_of(asked: list[Any]) -> None:
    model = HookedTransformer.from_pretrained("demo")
    model.cfg.original_architecture = "MambaForCausalLM"
    with pytest.raises(ValueError, match=r"MambaForCausalLM.*model\.dataset"):
        model.load_sample_training_dataset()
    assert not asked


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="hooked-lm\\[corpus\\]"):
        get_dataset("wiki")
