"""A model that is split over one process equals the whole one: what each rank computes, without a second process."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hooked_lm.components.experts.moe import ExpertPoint
from hooked_lm.hooks import HookPoint
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


@pytest.mark.every_parameter
@pytest.mark.parametrize("name", ["gpt2", "joint_norm", "mixture"])
def test_points_that_are_replaced_keep_names_axes_and_hooks(name: str) -> None:
    model = build(name)
    before = {site: (point, point.dims, point.on_demand) for site, point in model.all_points().items()}
    weights, seen = list(full_state_dict(model)), list[str]()

    def see(value: Tensor, hook: HookPoint) -> None:
        seen.append(hook.name or "")

    handles = {site: point.add_hook(see) for site, (point, *_) in before.items()}
    model.blocks[0].attn.register_forward_hook(lambda *_: seen.append("torch"))
    model(TOKENS)
    in_whole_model = sorted(seen)
    assert {"torch", "blocks.0.attn.hook_z", "blocks.1.mlp.hook_out"} <= {*in_whole_model}
    with model.hooks([("blocks.1.mlp.hook_out", see)]):
        tensor_parallel(model)
        found = model.all_points()
        assert {site: (point.dims, point.on_demand) for site, point in found.items()} == {
            site: tuple(rest) for site, (_, *rest) in before.items()
        }
        is_new = {site for site, point in found.items() if point is not before[site][0]}
        assert "blocks.0.attn.hook_z" in is_new
        assert {type(before[site][0]) for site in is_new} <= {HookPoint, ExpertPoint}  # no point changed its class
        assert list(full_state_dict(model)) == weights
        seen.clear()
        model(TOKENS)
        assert sorted(seen) == sorted([*in_whole_model, "blocks.1.mlp.hook_out"])
    for handle in handles.values():
        handle.remove()
    seen.clear()
    model(TOKENS)
    assert seen == ["torch"]
    assert not any(point.hooks_by_id() for point in found.values())


def test_hooks_on_the_inputs_of_a_module_that_is_replaced_stay() -> None:
    model, seen = build("gpt2"), list[str]()
    point, *_ = model.points_for("blocks.0.attn", "pre")
    handle = point.add_hook(lambda value, hook: seen.append(hook.name))
    tensor_parallel(model)(TOKENS)
    assert seen == ["blocks.0.attn.input"]
    handle.remove()
    model(TOKENS)
    assert seen == ["blocks.0.attn.input"]
