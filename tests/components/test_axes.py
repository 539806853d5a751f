"""What the texts of axes say."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.axes import Axes, axes_of, places_of, weights_with_axes
from hooked_lm.components.mlp import MLP, GatedMLP


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


def test_heads_whose_groups_have_outputs_of_their_own() -> None:
    module = nn.Module()
    module.cfg = SimpleNamespace(n_groups=2)
    assert Axes.parse("[head/n_groups d_head] d_out; by groups").fans(torch.zeros(6, 3, 5), module) == (9, 5)


def test_the_weights_that_have_an_axis() -> None:
    assert places_of(GatedMLP, "d_mlp") == {"W_in": 1, "W_gate": 1, "W_out": 0, "b_in": 0, "b_gate": 0}
    assert places_of(GatedAttention, "head").keys() == {"W_Q", "b_Q", "W_O", "W_gate", "b_gate", "sinks"}
    assert places_of(GatedAttention, "kv_head") == dict.fromkeys(("W_K", "W_V", "b_K", "b_V"), 0)
    assert places_of(GatedAttention, "d_model") == {"W_Q": 1, "W_K": 1, "W_V": 1, "W_gate": 1, "W_O": 2, "b_O": 0}
    assert places_of(nn.Linear, "d_model") == {}
