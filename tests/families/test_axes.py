"""What components state of the axes of their weights, for the weights of all families."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.axes import Axes, axes_of, places_of, weights_with_axes
from hooked_lm.components.mlp import MLP, GatedMLP
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


def test_a_weight_with_another_number_of_axes_is_refused() -> None:
    mlp = MLP.Config(12, 20).build()
    mlp.W_out = nn.Parameter(torch.zeros(2, 10, 12))
    with pytest.raises(ValueError, match=r"MLP.W_out has the axes \[d_mlp d_model\], but .* the shape \[2, 10, 12\]"):
        axes_of(mlp, "W_out")
    with pytest.raises(ValueError, match=r"MLP.W_out has the axes"):
        list(weights_with_axes(nn.Sequential(mlp)))


@pytest.mark.parametrize(
    "text", ["", "head d_model] d_head", "[head] d_model [d_head]", "head, [d_model]", "[] d_head"]
)
def test_texts_that_state_no_axes(text: str) -> None:
    with pytest.raises(ValueError, match="expected names, those that a product sums over side by side in one pair"):
        Axes.parse(text)


@pytest.mark.parametrize(
    ("text", "shape", "matrix"),
    [
        ("[d_in] d_out", (2, 3), "io->oi"),
        ("head [d_model] d_head", (2, 3, 4), "nmh->nhm"),
        ("[head d_head] d_model", (2, 3, 4), "nhm->mnh"),
        ("[gate] stream source", (2, 3, 4), "gab->abg"),
    ],
)
def test_a_weight_and_its_matrix(text: str, shape: tuple[int, ...], matrix: str) -> None:
    axes, weight = Axes.parse(text), torch.randn(shape)
    found = axes.matrix(weight)
    fan_in, fan_out = axes.fans(weight, nn.Identity())
    assert found.shape == (fan_out, fan_in)
    assert torch.equal(found, torch.einsum(matrix, weight).reshape(fan_out, fan_in))
    assert torch.equal(axes.weight(found.contiguous(), weight.shape), weight)


def test_the_weights_that_have_an_axis() -> None:
    assert places_of(GatedMLP, "d_mlp") == {"W_in": 1, "W_gate": 1, "W_out": 0, "b_in": 0, "b_gate": 0}
    assert places_of(GatedAttention, "head").keys() == {"W_Q", "b_Q", "W_O", "W_gate", "b_gate", "sinks"}
    assert places_of(GatedAttention, "kv_head") == dict.fromkeys(("W_K", "W_V", "b_K", "b_V"), 0)
    assert places_of(GatedAttention, "d_model") == {"W_Q": 1, "W_K": 1, "W_V": 1, "W_gate": 1, "W_O": 2, "b_O": 0}
    assert places_of(nn.Linear, "d_model") == {}
