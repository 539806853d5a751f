"""The bundled model with few weights does what its card says."""

from random import Random

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.planted.trained import CLOSES, N_CTX, VOCABULARY, random_tokens


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing("demo-sparse")


def test_most_weights_are_0(model: HookedTransformer) -> None:
    weights = {name: weight for name, weight in model.named_parameters() if ".W_" in name}
    assert len(weights) == 15
    for name, weight in weights.items():
        assert 0.01 < float((weight != 0).double().mean()) <= 0.06, name


def test_values_close_as_they_opened(model: HookedTransformer) -> None:
    rng = Random(2)
    texts = [random_tokens(rng) for _ in range(100)]
    tokens = torch.tensor([[VOCABULARY.index(token) for token in text] for text in texts])
    closers = sorted({*CLOSES.values()})
    ids = torch.tensor([VOCABULARY.index(closer) for closer in closers])
    said = model(tokens)[..., ids].argmax(-1)
    right = []
    for text, row in zip(texts, said.tolist(), strict=True):
        opened = ""
        for place in range(1, N_CTX - 1):
            if text[place - 1] == "=":
                opened = text[place]
            elif opened and text[place + 1] == CLOSES[opened]:
                right.append(closers[row[place]] == CLOSES[opened])
                opened = ""
    assert len(right) > 150
    assert all(right)


def test_it_reads_text(model: HookedTransformer) -> None:
    assert model.to_str_tokens("x = ( a b") == ["^", "x", "=", "(", "a", "b"]
    assert model.to_single_str_token(int(model("x = ( a b c d")[0, -1].argmax())) == ")"
