"""Where the random numbers of new weights come from."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedTransformer
from hooked_lm.models.weights.init import drawn_weights
from tests.devices import labelled_devices, values
from tests.families import CASES
from tests.families._models import hooked

SIZES: dict[str, Any] = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 9, "act_fn": "relu"}
MODES = ("gpt2", "muP", "xavier_normal", "xavier_uniform", "kaiming_normal", "kaiming_uniform")
MODELS = (HookedTransformer, HookedEncoder, HookedEncoderDecoder)


def weights(model: Any, of_torch: int, **fields: Any) -> Tensor:
    torch.manual_seed(of_torch)
    return torch.cat([weight.flatten() for weight in model({**SIZES, **fields}).parameters()]).detach()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_the_seed_of_torch_decides_without_one_of_the_model(model: Any, mode: str) -> None:
    assert torch.equal(weights(model, 0, init_mode=mode), weights(model, 0, init_mode=mode))
    assert not torch.equal(weights(model, 0, init_mode=mode), weights(model, 1, init_mode=mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_a_seed_of_the_model_decides_and_leaves_torch_alone(model: Any, mode: str) -> None:
    torch.manual_seed(7)
    after_none = torch.rand(3)
    first = weights(model, 7, init_mode=mode, seed=3)
    assert torch.equal(torch.rand(3), after_none)
    assert torch.equal(first, weights(model, 8, init_mode=mode, seed=3))


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_the_same_numbers_on_every_device(mode: str) -> None:
    """Also of models in half precision; an untrained twin is the same model wherever it is drawn."""
    for dtype in (torch.float32, torch.bfloat16):
        model = HookedTransformer({**SIZES, "device": "cpu", "init_mode": mode, "seed": 3}).to(dtype)
        model.init_weights()
        expected = [weight.clone() for _, weight in drawn_weights(model)]
        with labelled_devices():
            model.to("lazy:0")
            for _, weight in drawn_weights(model):
                weight.fill_(7)
            model.init_weights()
            found = [values(weight) for _, weight in drawn_weights(model)]
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("family", "name", "inputs"),
    [
        ("deepseek_v4", "attn.W_UO", lambda cfg: cfg.n_groups * cfg.d_o_latent),
        ("deepseek_v4", "attn.W_DO", lambda cfg: cfg.n_heads // cfg.n_groups * cfg.d_head),
        ("doge", "attn.W_dt", lambda cfg: cfg.n_kv * cfg.d_head),
        ("convbert", "attn.conv.W_kernel", lambda cfg: cfg.n_heads * cfg.d_head),
    ],
)
def test_a_weight_that_is_summed_over_heads_or_groups_counts_the_inputs_of_all(
    family: str, name: str, inputs: Callable[[Any], int]
) -> None:
    model = copy.deepcopy(hooked(next(case for case in CASES if case.family == family)))
    model.cfg.init_mode, model.cfg.seed, model.cfg.initializer_range = "kaiming_normal", 0, 0.5
    model.init_weights()
    weight, n_inputs = model.blocks[0].get_parameter(name), inputs(model.blocks[0].attn.cfg)
    assert n_inputs > weight.shape[-2]
    assert 0.8 < weight.std().item() / (0.5 * (2 / n_inputs) ** 0.5) < 1.2


def test_a_weight_whose_module_does_not_state_its_axes() -> None:
    model = HookedTransformer(SIZES)
    model.blocks[0].mlp = type("Foreign", (nn.Module,), {})()
    model.blocks[0].mlp.W_in = nn.Parameter(torch.zeros(8, 32))
    model.init_weights()
    assert model.blocks[0].mlp.W_in.any()
    model.cfg.init_mode = "muP"
    with pytest.raises(ValueError, match=r"'blocks\.0\.mlp\.W_in' \[8, 32\] is drawn by its number of inputs.*axes = "):
        model.init_weights()


def test_drawing_again() -> None:
    torch.manual_seed(1)
    model = HookedTransformer(SIZES)
    before = model.W_E.clone()
    torch.manual_seed(0)
    model.init_weights()
    first = model.W_E.clone()
    torch.manual_seed(0)
    model.init_weights()
    assert torch.equal(model.W_E, first)
    assert not torch.equal(before, first)
