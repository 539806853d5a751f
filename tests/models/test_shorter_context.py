"""`cfg.n_ctx` of a model that is built may be lowered for a while: clients do so to cut texts, and set it back."""

import pytest
import torch

from tests.models.toys import N_CTX, ids, toy


@pytest.mark.parametrize("kind", ["standard", "rotary"])
def test_prompts_are_held_to_it(kind: str) -> None:
    model, tokens = toy(kind), ids(batch=2, n_pos=8)
    before = model(tokens)
    model.cfg.n_ctx = 5
    with pytest.raises(ValueError, match=r"8 tokens.*n_ctx of 5"):
        model(tokens)
    assert model(tokens[:, :5]).shape == (2, 5, 50)
    with pytest.raises(ValueError, match="n_ctx"):
        model.cfg.n_ctx = 0
    model.cfg.n_ctx = N_CTX
    assert torch.equal(model(tokens), before)
    assert model.cfg.tree.n_ctx == N_CTX
