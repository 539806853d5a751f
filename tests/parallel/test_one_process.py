"""A model that is split over one process equals the whole one: what each rank computes, without a second process."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hooked_lm.parallel import full_state_dict, tensor_parallel
from tests.close import GRADIENT, assert_apart, assert_close
from tests.parallel.worker import MODELS, build

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def halved(value: Tensor, hook: object) -> Tensor:
    return value / 2


@pytest.mark.every_parameter
@pytest.mark.parametrize("name", MODELS)
def test_values_edits_and_gradients_are_those_of_the_whole_model(name: str) -> None:
    whole = build(name)
    split = tensor_parallel(copy.deepcopy(whole))
    assert_close(split(TOKENS), whole(TOKENS))
    last = "blocks.1.mlp.experts.*.hook_post" if name == "mixture" else "blocks.1.mlp.hook_post"
    for site in ("blocks.0.attn.hook_z", "blocks.0.attn.hook_result", "blocks.0.attn.hook_pattern", last):
        found, expected = (model.run_with_hooks(TOKENS, fwd_hooks=[(site, halved)]) for model in (split, whole))
        assert_close(found, expected, msg=site)
        assert_apart(expected, whole(TOKENS), msg=site)
    for model in (split, whole):
        model(TOKENS, return_type="loss").backward()
    assert_close(split.embed.W_E.grad, whole.embed.W_E.grad, GRADIENT)
    state = whole.state_dict()
    for weight, value in full_state_dict(split).items():
        assert torch.equal(value, state[weight]), weight


def test_a_model_is_split_once() -> None:
    model = tensor_parallel(build("gpt2"))
    with pytest.raises(ValueError, match="this model is split already"):
        tensor_parallel(model)
