"""Hook objects: direction, when, order, registration; proved against hooks of PyTorch and against plain arithmetic."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hooked_lm.hooks import HookedRootModule, HookPoint, wrap
from tests.close import GRADIENT, assert_close
from tests.hooks.nets import Net, assert_no_hook_left, net, some_input


class Affine:
    """A hook object that multiplies and adds, and counts its calls."""

    def __init__(self, hook_point: Any, scale: float = 1.0, shift: float = 0.0, **attributes: Any) -> None:
        self.hook_point, self.scale, self.shift, self.shown = hook_point, scale, shift, 0
        self.__dict__.update(attributes)

    def __call__(self, value: Tensor, hook: HookPoint) -> Tensor:
        self.shown += 1
        return self.scale * value + self.shift


class Keep:
    """A hook object that keeps what it was shown."""

    def __init__(self, hook_point: Any, **attributes: Any) -> None:
        self.hook_point, self.seen = hook_point, []
        self.__dict__.update(attributes)

    def __call__(self, value: Tensor, hook: HookPoint) -> None:
        self.seen.append(value)


# ---- one or several ------------------------------------------------------------------------------------------------

ONE_HOOK = {
    "an object": Affine("blocks.0.hook_post", 2.0, 1.0),
    "a pair": ("blocks.0.hook_post", lambda value, hook: 2 * value + 1),
    "a pair with names": (["blocks.0.hook_post"], lambda value, hook: 2 * value + 1),
    "a pair with a predicate": (lambda name: name == "blocks.0.hook_post", lambda value, hook: 2 * value + 1),
    "a pair with an object": ("blocks.0.hook_post", Affine("blocks.1.hook_post", 2.0, 1.0)),
}


@pytest.mark.parametrize("one", ONE_HOOK.values(), ids=ONE_HOOK)
def test_one_hook_is_accepted_in_place_of_a_list(one: Any) -> None:
    model = net()
    expected = model.run_with_hooks(some_input(), fwd_hooks=[one])
    assert not torch.equal(expected, model(some_input()))
    assert torch.equal(model.run_with_hooks(some_input(), fwd_hooks=one), expected)
    with model.hooks(one):
        assert torch.equal(model(some_input()), expected)
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    assert torch.equal(wrap(plain).run_with_hooks(x, fwd_hooks=("0", lambda value, hook: value * 0)), plain[1](x * 0))
    assert_no_hook_left(model)


def test_two_hooks_are_not_taken_for_a_pair() -> None:
    model, site = net(), "blocks.0.hook_post"
    objects, pairs = (Affine(site, 2.0), Affine(site, shift=3.0)), ((site, lambda value, hook: 2 * value), Affine(site))
    for two in (objects, list(objects), pairs, list(pairs), (pairs[0], pairs[0])):
        expected = model.run_with_hooks(some_input(), fwd_hooks=[*two])
        with model.hooks([two[0]]), model.hooks([two[1]]):
            assert torch.equal(model(some_input()), expected)
        assert torch.equal(model.run_with_hooks(some_input(), fwd_hooks=two), expected)


# ---- values and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_as", ["fwd_hooks", "bwd_hooks"])
def test_an_object_for_gradients_goes_there_from_either_list(given_as: str) -> None:
    model, keep = net(), Keep("blocks.0.hook_post", direction="bwd")
    expected: list[Tensor] = []
    plain = net()

    def by_hand(module: Any, args: Any, output: Tensor) -> None:
        output.register_hook(expected.append)

    plain.blocks[0].hook_post.register_forward_hook(by_hand)
    plain(some_input(), loss=True).backward()
    model.run_with_hooks(some_input(), loss=True, **{given_as: [keep]}).backward()
    assert_close(keep.seen, expected)
    assert_no_hook_left(model)


def test_one_list_for_both_directions() -> None:
    model, scale = net(), Affine("hook_in", 3.0, direction="bwd")
    keep, x = Keep("hook_out"), some_input().requires_grad_()
    with model.hooks([scale, keep, ("hook_out", lambda value, hook: None)]):
        model(x, loss=True).backward()
    y = some_input().requires_grad_()
    net()(y, loss=True).backward()
    assert x.grad is not None
    assert y.grad is not None
    assert_close(x.grad, 3 * y.grad, depth=GRADIENT)
    assert len(keep.seen) == 1


def test_the_list_says_gradient_for_an_object_that_says_value() -> None:
    model, keep = net(), Keep("hook_out", direction="fwd")
    model.run_with_hooks(some_input(), loss=True, bwd_hooks=[keep]).backward()
    assert_close(keep.seen[0], 2 * net()(some_input()))


def test_an_object_in_a_pair_keeps_its_direction_but_stands_elsewhere() -> None:
    model, keep = net(), Keep("hook_in", direction="bwd")
    model.run_with_hooks(some_input(), loss=True, fwd_hooks=[("hook_out", keep)]).backward()
    assert_close(keep.seen[0], 2 * net()(some_input()))


@pytest.mark.parametrize(
    "wrong", [{"direction": "up"}, {"when": "later"}, {"direction": torch.ones(3)}, {"when": None}]
)
def test_what_there_is_not_is_refused_before_anything_runs(wrong: dict[str, Any]) -> None:
    model, [name] = net(), wrong
    with pytest.raises(ValueError, match=f"the {name} of a hook object is"):
        model.run_with_hooks(some_input(), fwd_hooks=[Keep("hook_in"), Keep("hook_in", **wrong)])
    with pytest.raises(ValueError, match=name):
        model.register(Keep("hook_in", **wrong))
    assert model.runs == 0
    assert model.registered() == {}
    assert_no_hook_left(model)


# ---- before and after ----------------------------------------------------------------------------------------------


def test_early_hooks_run_before_all_others() -> None:
    model, order = net(), []

    def noting(name: str, **attributes: Any) -> Keep:
        keep = Keep("hook_in", **attributes)
        keep.seen = type("Notes", (), {"append": lambda self, value: order.append(name)})()  # type: ignore[assignment]
        return keep

    model.add_hook("hook_in", lambda value, hook: order.append("by hand"))
    with (
        model.hooks([noting("post"), noting("pre", when="pre")]),
        model.hooks([noting("inner pre", when="pre"), noting("inner post", when="post")]),
    ):
        model(some_input())
    assert order == ["pre", "inner pre", "by hand", "post", "inner post"]


def test_an_early_gradient_is_that_of_what_came_in() -> None:
    model = net()
    keep_pre, keep_post = (Keep("hook_out", when=when, direction="bwd") for when in ("pre", "post"))
    with model.hooks([Affine("hook_out", 5.0), keep_pre, keep_post]):
        model(some_input(), loss=True).backward()
    out = net()(some_input())
    assert_close(keep_post.seen[0], 2 * 5 * out)
    assert_close(keep_pre.seen[0], 5 * 2 * 5 * out)


def test_the_inputs_of_a_module_that_has_no_point_there() -> None:
    model, keep = net(), Keep("blocks.*.linear", when="pre")
    model.run_with_hooks(some_input(), fwd_hooks=[Affine("blocks.1.linear", 0.5, 1.0, when="pre"), keep])
    plain, expected = net(), []

    def halve(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        return (0.5 * args[0] + 1.0,)

    plain.blocks[1].linear.register_forward_pre_hook(halve)
    for block in plain.blocks:
        block.linear.register_forward_pre_hook(lambda module, args: expected.append(args[0]))
    out = plain(some_input())
    assert_close(keep.seen, expected)
    with model.hooks([Affine("blocks.1.linear", 0.5, 1.0, when="pre")]):
        assert_close(model(some_input()), out)
    assert not any(module._forward_pre_hooks for module in model.modules()), "PyTorch's hooks go with ours"
    assert torch.equal(model(some_input()), net()(some_input()))


def test_gradients_at_inputs_of_modules() -> None:
    model, keep = net(), Keep("blocks.1.linear", when="pre", direction="bwd")
    model.run_with_hooks(some_input(), loss=True, fwd_hooks=[keep]).backward()
    plain, grads = net(), []
    plain.blocks[1].linear.register_full_backward_pre_hook(lambda m, g: grads.append(g[0] @ m.weight))
    plain(some_input(), loss=True).backward()
    assert_close(keep.seen, grads, depth=GRADIENT)


def test_a_module_is_no_site_for_what_comes_after_it() -> None:
    model = net()
    with pytest.raises(KeyError, match=r"blocks\.0\.linear"):
        model.run_with_hooks(some_input(), fwd_hooks=[Keep("blocks.0.linear")])
    with pytest.raises(KeyError, match="did you mean"):
        model.run_with_hooks(some_input(), fwd_hooks=[Keep("blocks.7.linear", when="pre")])
    assert model.runs == 0


def test_inputs_of_a_replaced_module() -> None:
    model = net()
    model.register(Affine("blocks.0.linear", 0.0, when="pre"))
    assert list(model.list_hooks()) == ["blocks.0.linear.input"]
    model.blocks[0].linear = torch.nn.Linear(4, 4)
    model.setup()
    assert model.list_hooks() == {}
    keep = Keep("blocks.0.linear", when="pre")
    model.run_with_hooks(some_input(), fwd_hooks=[keep])
    assert torch.equal(keep.seen[0], some_input())
    assert model.registered() == {}, "what stood on the old module went with it"


# ---- registered for good -------------------------------------------------------------------------------------------


def test_registered_hooks_stay_through_resets_until_they_are_unregistered() -> None:
    model, first, second = net(), Affine("hook_in", 2.0), Affine("hook_in", 1.0, 1.0)
    pair = ("hook_out", lambda value, hook: -value)
    ids = [model.register(one) for one in (first, second, pair)]
    assert len(set(ids)) == 3
    assert model.registered() == dict(zip(ids, [first, second, pair], strict=True))
    assert list(model.registered()) == ids
    model.reset_hooks()
    assert_close(model(some_input()), -net()(2 * some_input() + 1))
    model.unregister(ids[0])
    assert model.registered() == {ids[1]: second, ids[2]: pair}
    assert_close(model(some_input()), -net()(some_input() + 1))
    with pytest.raises(KeyError, match=f"no hook is registered under {ids[0]}; the ids are {ids[1]}, {ids[2]}"):
        model.unregister(ids[0])
    for hook_id in ids[1:]:
        model.unregister(hook_id)
    assert_no_hook_left(model)
    with pytest.raises(KeyError, match="the ids are none"):
        model.unregister(ids[1])


def test_a_reset_of_permanent_hooks_is_one_of_registered_hooks() -> None:
    model = net()
    model.register(Keep("hook_in"))
    gradient = model.register(Keep("hook_*", direction="bwd"))
    model.reset_hooks(direction="fwd", including_permanent=True)
    assert list(model.registered()) == [gradient]
    model.reset_hooks(including_permanent=True)
    assert model.registered() == {}
    assert_no_hook_left(model)


def test_the_same_object_twice_is_two_hooks() -> None:
    model, hook = net(), Affine("hook_in", 2.0)
    first, second = model.register(hook), model.register(hook)
    assert_close(model(some_input()), net()(4 * some_input()))
    model.unregister(first)
    assert_close(model(some_input()), net()(2 * some_input()))
    assert list(model.registered()) == [second]


def test_nothing_is_half_registered() -> None:
    class Strict(Net):
        def check_hooks_to_add(self, hook_point: HookPoint, hook_point_name: str, *rest: Any) -> None:
            if hook_point_name == "blocks.1.hook_pre":
                raise ValueError("not here")

    for model, site, kind in (
        (net(), ["hook_in", "hook_ot"], KeyError),
        (net(), "hook_in", TypeError),
        (Strict(), "blocks.*.hook_pre", ValueError),
    ):
        hook: Any = Keep(site)
        if kind is TypeError:
            hook = (site, lambda value: value)
        with pytest.raises(kind):
            model.register(hook)
        assert model.registered() == {}
        assert_no_hook_left(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("site", ["hook_in", "blocks.0.linear"])
def test_registered_hooks_travel_with_copies_and_pickles(duplicate: Callable[[Net], Net], site: str) -> None:
    model = net()
    hook_id = model.register(Affine(site, 2.0, 1.0, when="pre"))
    expected, plain = model(some_input()), net()(some_input())
    twin = duplicate(model)
    assert torch.equal(twin(some_input()), expected)
    assert list(twin.registered()) == [hook_id]
    twin.unregister(hook_id)
    assert torch.equal(twin(some_input()), plain)
    assert not any(module._forward_pre_hooks for module in twin.modules())
    assert torch.equal(model(some_input()), expected), "the first keeps its own"
    model.unregister(hook_id)
    assert torch.equal(model(some_input()), plain)


# ---- threads, failures, stacks -------------------------------------------------------------------------------------


def test_two_threads_see_their_own_objects() -> None:
    model, barrier, results = net(), threading.Barrier(2), {}

    def run(scale: float) -> None:
        pre = Affine("blocks.0.linear", scale, when="pre")
        with model.hooks([pre, Affine("hook_in", scale)]):
            barrier.wait(10)
            results[scale] = [model(some_input()) for _ in range(20)]
            barrier.wait(10)
        results[-scale] = pre.shown

    threads = [threading.Thread(target=run, args=(scale,)) for scale in (2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for scale in (2.0, 3.0):
        plain = net()
        plain.blocks[0].linear.register_forward_pre_hook(lambda module, args, scale=scale: (scale * args[0],))
        for out in results[scale]:
            assert_close(out, plain(scale * some_input()))
        assert results[-scale] == 20
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_exception_leaves_nothing() -> None:
    model = net()

    def fails(value: Tensor, hook: HookPoint) -> None:
        raise RuntimeError(hook.name)

    for site in ("hook_out", "blocks.1.linear"):
        hook: Any = Keep(site, when="pre")
        hook.__class__ = type("Fails", (Keep,), {"__call__": lambda self, value, hook: fails(value, hook)})
        with pytest.raises(RuntimeError, match=site), model.hooks([Keep("blocks.0.linear", when="pre"), hook]):
            model(some_input())
        assert_no_hook_left(model)
        assert not any(module._forward_pre_hooks for module in model.modules())


MOVES = st.tuples(
    st.sampled_from(["pre", "post"]),
    st.sampled_from([0.5, -1.0, 2.0]),
    st.sampled_from([0.0, 1.0, -0.25]),
    st.sampled_from(["scope", "inner scope", "registered"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(MOVES, max_size=7), st.booleans())
def test_a_stack_of_objects_is_one_after_the_other(moves: list[tuple[str, float, float, str]], wrapped: bool) -> None:
    """Those before, then those after; among equals, in the order in which they were put there."""
    model: HookedRootModule = wrap(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Tanh())) if wrapped else net()
    site, watch = ("0", "0") if wrapped else ("hook_in", "hook_in")
    objects = [(where, Affine(site, scale, shift, when=when)) for when, scale, shift, where in moves]
    placed = [
        (where, one) for kind in ("registered", "scope", "inner scope") for where, one in objects if where == kind
    ]
    ids = [model.register(one) for where, one in placed if where == "registered"]
    keep = Keep(watch)
    with (
        model.hooks([one for where, one in placed if where == "scope"]),
        model.hooks([one for where, one in placed if where == "inner scope"]),
        model.hooks([keep]),
    ):
        out = model(some_input())
    expected = some_input()
    for when in ("pre", "post"):
        for _, one in placed:
            if one.when == when:  # type: ignore[attr-defined]
                expected = one.scale * expected + one.shift
    assert_close(keep.seen, [expected])
    assert_close(out, torch.tanh(expected) if wrapped else net()(expected))
    for hook_id in ids:
        model.unregister(hook_id)
    assert_no_hook_left(model)


def test_names_print_as_a_tree() -> None:
    names = net().names()
    assert list(names) == list(net().all_points())
    assert repr(names).splitlines()[:4] == [
        "hook_in  batch pos d_model",
        "blocks",
        "  0",
        "    hook_pre  batch pos d_model",
    ]
