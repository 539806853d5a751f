"""What is said to cross between host and device, and what is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.components.constants import constant, numbers
from tests.families._fake import DEVICE, assert_nothing_crosses

CROSSES: dict[str, Callable[[Tensor], Any]] = {
    "a value": lambda x: x + x.sum().item(),
    "a truth": lambda x: x if (x > 0).any() else -x,
    "values in a list": lambda x: x.tolist(),
    "a mask as an index": lambda x: x[x > 0],
    "a length": lambda x: x[: x.argmax()],
    "repeats": lambda x: x.repeat_interleave(torch.ones(len(x), dtype=torch.long, device=DEVICE), 0),
    "which is largest": lambda x: torch.nn.functional.one_hot(x.argmax(-1)),
    "a copy to the host": lambda x: x.cpu(),
    "a copy to the device": lambda x: x + torch.ones(x.shape[-1]).to(DEVICE),
    "a number to the device": lambda x: x + torch.ones(()).to(DEVICE),
    "a table of the host": lambda x: x * torch.ones(x.shape[-1]),
    "a mask of the host": lambda x: torch.where(torch.ones(x.shape[-1]) > 0, x, 0.0),
    "values of the host": lambda x: x.copy_(torch.zeros(x.shape)),
    "an index of the host": lambda x: x + x[torch.tensor([0])],
    "a list as an index": lambda x: x + x[:, [0]],
    "a list for the device": lambda x: x + torch.tensor([1.0], device=DEVICE),
    "a new number": lambda x: x + x.new_tensor(2.0),
}
STAYS: dict[str, Callable[[Tensor], Any]] = {
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "a constant": lambda x: x * constant(x, numbers, 2.0),
    "positions": lambda x: x + torch.arange(x.shape[-1], device=x.device),
    "hidden values": lambda x: x.masked_fill(x > 0, 0.0),
    "slices": lambda x: torch.cat([x[..., :1], x[..., 1:]], -1),
    "an index of the device": lambda x: x.gather(-1, x.argsort(-1)),
}


def model_with(act_fn: Callable[[Tensor], Any]) -> HookedTransformer:
    cfg = HookedTransformerConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=6, d_vocab=7, act_fn="relu", seed=0)
    model = HookedTransformer(cfg)
    model.blocks[0].mlp.act_fn = act_fn  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("what", CROSSES)
def test_what_crosses_is_noticed(what: str):
    with pytest.raises((AssertionError, RuntimeError), match=r"between host and device|meta"):
        assert_nothing_crosses(model_with(CROSSES[what]), 6)


@pytest.mark.parametrize("what", STAYS)
def test_what_stays_on_the_device_is_allowed(what: str):
    assert_nothing_crosses(model_with(STAYS[what]), 6)
