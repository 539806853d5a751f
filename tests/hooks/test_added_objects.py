"""Hook objects that are added by hand: their `direction` and `when` hold there too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm.hooks import HookPoint, wrap
from tests.close import assert_close
from tests.hooks.nets import Net, assert_no_hook_left, net, some_input
from tests.hooks.test_objects import Affine, Keep

SITE = "blocks.0.hook_post"


def by_point(model: Net, hook: Any, **options: Any) -> None:
    model.hook_dict[SITE].add_hook(hook, **options)


def by_name(model: Net, hook: Any, **options: Any) -> None:
    model.add_hook(SITE, hook, **options)


def checked(model: Net, hook: Any, **options: Any) -> None:
    model.check_and_add_hook(model.hook_dict[SITE], SITE, hook, **options)


def permanent(model: Net, hook: Any, **options: Any) -> None:
    model.add_perma_hook(SITE, hook, **options)


def permanent_by_point(model: Net, hook: Any, **options: Any) -> None:
    model.hook_dict[SITE].add_perma_hook(hook, **options)


WAYS = [by_point, by_name, checked, permanent, permanent_by_point]
every_way = pytest.mark.parametrize("add", WAYS)


@every_way
def test_an_object_for_gradients_leaves_values_alone(add: Callable[..., None]) -> None:
    model, expected = net(), net()
    add(model, Affine(SITE, 0.0, direction="bwd"))
    expected.run_with_hooks(some_input(), loss=True, bwd_hooks=[(SITE, lambda value, hook: 0 * value)]).backward()
    loss = model(some_input(), loss=True)
    assert torch.equal(loss, net()(some_input(), loss=True)), "the values are untouched"
    loss.backward()
    assert_close(model.blocks[0].linear.weight.grad, expected.blocks[0].linear.weight.grad)
    assert (model.hook_dict[SITE].bwd_hooks, model.hook_dict[SITE].fwd_hooks) != ([], [])
    model.reset_hooks(including_permanent=True)
    assert_no_hook_left(model)


@every_way
def test_an_early_object_runs_first(add: Callable[..., None]) -> None:
    model, early = net(), Keep(SITE, when="pre")
    model.add_hook(SITE, lambda value, hook: 0 * value)
    add(model, early)
    model(some_input())
    _, cache = net().run_with_cache(some_input())
    assert torch.equal(early.seen[0], cache[SITE])


@every_way
@pytest.mark.parametrize("dir", ["fwd", "both"])
def test_a_direction_that_contradicts_the_object_is_refused(add: Callable[..., None], dir: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=rf"dir='{dir}' contradicts the direction of .*Affine.*'bwd'"):
        add(model, Affine(SITE, 0.0, direction="bwd"), dir=dir)
    assert_no_hook_left(model)


@every_way
def test_unknown_attributes_of_an_object_are_refused(add: Callable[..., None]) -> None:
    model = net()
    for wrong in ({"direction": "up"}, {"when": "later"}):
        with pytest.raises(ValueError, match=f"the {next(iter(wrong))} of a hook object is"):
            add(model, Keep(SITE, **wrong))
    with pytest.raises(ValueError, match="dir must be"):
        add(model, lambda value, hook: None, dir="forward")
    assert_no_hook_left(model)


@every_way
def test_the_caller_may_send_an_object_for_values_to_the_gradient(add: Callable[..., None]) -> None:
    model, keep = net(), Keep(SITE)
    add(model, keep, dir="bwd")
    model(some_input())
    assert keep.seen == []
    model(some_input(), loss=True).backward()
    assert len(keep.seen) == 1


def test_an_early_object_on_a_module_is_shown_its_input() -> None:
    model, expected = net(), net()
    model.add_hook("blocks.*.linear", Affine("blocks.*.linear", 2.0, when="pre"))
    for block in expected.blocks:
        block.linear.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert_close(model(some_input()), expected(some_input()))
    model.reset_hooks()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_objects_on_a_wrapped_module() -> None:
    net_of_torch = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    wrapped, x = wrap(net_of_torch), torch.ones(2, 3, requires_grad=True)
    wrapped.add_hook("1", Affine("1", 0.0, when="pre", direction="bwd"))
    out = wrapped(x)
    assert torch.equal(out, net_of_torch(x))
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros(2, 3)), "the gradient of the input of module 1"


def test_a_functions_own_attributes_mean_nothing() -> None:
    def note(value: Tensor, hook: HookPoint) -> Tensor:
        return 2 * value

    note.direction, note.when = "bwd", "pre"  # type: ignore[attr-defined]
    model = net()
    model.add_hook("hook_in", note)
    assert_close(model(some_input()), net()(2 * some_input()))
