"""What components state of the axes of their weights, for the weights of all families."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.axes import axes_of, weights_with_axes
from hooked_lm.components.mlp import MLP
from hooked_lm.families import supported
from tests.core import marks
from tests.families import CASES, VISION_CASES
from tests.families._case import Case
from tests.families._models import hooked
from tests.families._vision import VisionCase, hooked_any

FIRST: dict[str, Case] = {case.family: case for case in reversed([*CASES, *VISION_CASES])}
COUNTS = {"head": "n_heads", "kv_head": "n_kv", "ssm_head": "n_heads", "choice": "n_choices", "layer": "n_layers"}
COUNTS |= {"channel_group": "n_channel_groups", "class": "n_classes", "series": "n_series", "channel": "n_channels"}


def model_of(case: Case) -> Any:
    is_text = case.family in supported() and not isinstance(case, VisionCase)
    return (hooked if is_text else hooked_any)(case)


def wrong(module: nn.Module, name: str, shape: torch.Size) -> Iterator[str]:
    """The axes of a weight whose size is not that of the config, where the config has one of this name."""
    axes = axes_of(module, name)
    assert axes is not None
    for axis, size in zip(axes.names, shape, strict=True):
        expected = int(axis) if axis.isdigit() else getattr(getattr(module, "cfg", None), COUNTS.get(axis, axis), None)
        if expected not in (None, size):
            yield f"{type(module).__name__}.{name}: {axis} is {size}, not {expected}"


def faults(model: nn.Module) -> list[str]:
    """The weights and biases whose axes are not stated, and those with another size."""
    stated = {name: module for name, module, _ in weights_with_axes(model)}
    found = []
    for name, weight in model.named_parameters():
        leaf = next(part for part in reversed(name.split(".")) if not part.isdigit())
        if name in stated:
            found += wrong(stated[name], leaf, weight.shape)
        elif leaf == "W" or leaf.startswith(("W_", "b_")):
            found.append(f"{name} has no axes")
    return found


@pytest.mark.parametrize("family", [pytest.param(name, marks=marks(name)) for name in FIRST])
def test_the_axes_of_every_weight_are_stated_and_have_the_sizes_of_the_config(family: str) -> None:
    assert faults(model_of(FIRST[family])) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("W_Q", "kv_head [d_model] d_head", "W_Q: kv_head is 4, not 2"),
        ("W_Q", "head d_head [d_model]", "W_Q: d_head is 12, not 3"),
        ("W_K", "head [d_model] d_head", "b_K: head is 2, not 4"),
        ("W_O", "[d_head head] d_model", "W_O: d_head is 4, not 3"),
    ],
)
def test_wrong_axes_are_noticed(name: str, text: str, fault: str) -> None:
    sizes = {"d_model": 12, "n_heads": 4, "d_head": 3, "n_key_value_heads": 2, "qkv_bias": True}
    assert faults(Attention.Config(**sizes).build()) == []
    kind = type("Other", (Attention,), {"axes": {name: text}})
    assert f"Other.{fault}" in faults(kind(Attention.Config(**sizes)))


def test_weights_without_axes_are_noticed() -> None:
    mlp = MLP.Config(12, 20, bias=False).build()
    mlp.W_other, mlp.b_other = nn.Parameter(torch.zeros(12, 20)), nn.Parameter(torch.zeros(20))
    assert faults(mlp) == ["W_other has no axes", "b_other has no axes"]
