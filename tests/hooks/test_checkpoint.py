"""Activation checkpointing: the recomputation sees the hooks that the forward pass saw, those and no others."""

import contextlib
import copy
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hooked_lm.hooks import HookPoint, wrap
from hooked_lm.hooks import checkpoint as of_checkpoints
from tests.close import assert_close
from tests.hooks.nets import Net, assert_no_hook_left, net, some_input

Run = Callable[..., Tensor]


class Mine(torch.autograd.Function):
    """Checkpointing as others write it: an autograd function that runs something again in its backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, gradients)
        return None, x.grad


KINDS: dict[str, Run] = {
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "not reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "of somebody else": Mine.apply,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Checkpointed(Net):
    """The same network, each block of which is run under activation checkpointing."""

    def __init__(self, kind: str, nested: bool = False) -> None:
        super().__init__()
        self.again, self.nested = KINDS[kind], nested

    def forward(self, x: Tensor, loss: bool = False) -> Tensor:
        x = self.hook_in(x)
        for block in self.blocks:
            x = self.again(lambda y, block=block: self.again(block, y), x) if self.nested else self.again(block, x)
        out = self.hook_out(3 * self.hook_right(self.hook_left(x)))
        return (out**2).sum() if loss else out


def pair(kind: str, **options: Any) -> tuple[Checkpointed, Net]:
    """A net under checkpointing and the same without."""
    torch.manual_seed(1)
    return Checkpointed(kind, **options), net()


def leaf() -> Tensor:
    return some_input().requires_grad_()


def assert_same_gradients(checkpointed: nn.Module, plain: nn.Module) -> None:
    for (name, mine), (_, other) in zip(checkpointed.named_parameters(), plain.named_parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            assert_close(mine.grad, other.grad, msg=lambda message, name=name: f"{name}: {message}")


def in_thread(function: Callable[[], None]) -> None:
    """As autograd does for tensors on a GPU: in a thread that knows nothing of our contexts."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def scale(factor: float) -> Any:
    return lambda value, hook: factor * value


HOOKS = [("blocks.0.hook_post", scale(0.0)), ("blocks.1.hook_pre", scale(-2.0)), ("hook_in", scale(1.5))]


@contextlib.contextmanager
def by_hand(model: Net) -> Iterator[None]:
    for site, function in HOOKS:
        model.add_hook(site, function)
    yield
    model.reset_hooks()


@contextlib.contextmanager
def registered(model: Net) -> Iterator[None]:
    ids = [model.register(hook) for hook in HOOKS]
    yield
    for hook_id in ids:
        model.unregister(hook_id)


WAYS = {"scope": lambda model: model.hooks(HOOKS), "by hand": by_hand, "registered": registered}


@every_kind
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("threaded", [False, True])
def test_gradients_after_the_hooks_are_gone(kind: str, way: str, nested: bool, threaded: bool) -> None:
    checkpointed, plain = pair(kind, nested=nested)
    losses = []
    for model in (checkpointed, plain):
        with WAYS[way](model):
            losses.append(model(leaf(), loss=True))
    assert torch.equal(*losses)
    (in_thread if threaded else lambda f: f())(losses[0].backward)
    losses[1].backward()
    assert_same_gradients(checkpointed, plain)
    del losses, model
    assert_no_hook_left(checkpointed)


@every_kind
@pytest.mark.parametrize("threaded", [False, True])
def test_a_backward_pass_inside_the_block_or_under_other_hooks(kind: str, threaded: bool) -> None:
    checkpointed, plain = pair(kind)
    run = in_thread if threaded else lambda f: f()
    with plain.hooks(HOOKS):
        plain(leaf(), loss=True).backward()
    with checkpointed.hooks(HOOKS):
        run(checkpointed(leaf(), loss=True).backward)
    assert_same_gradients(checkpointed, plain)
    checkpointed.zero_grad(), plain.zero_grad()
    plain(leaf(), loss=True).backward()
    loss = checkpointed(leaf(), loss=True)
    checkpointed.add_hook("blocks.1.hook_post", scale(5.0))
    with checkpointed.hooks(HOOKS):
        run(loss.backward)
    assert_same_gradients(checkpointed, plain)


@every_kind
def test_runs_under_different_hooks_in_one_backward_pass(kind: str) -> None:
    checkpointed, plain = pair(kind)
    for model in (checkpointed, plain):
        losses = [model(leaf(), loss=True)]
        for factor in (0.0, -1.0, 3.0):
            with model.hooks([("blocks.*.hook_post", scale(factor))]):
                losses.append(model(leaf(), loss=True))
        torch.stack(losses).sum().backward()
    assert_same_gradients(checkpointed, plain)


@every_kind
def test_a_graph_that_is_used_twice(kind: str) -> None:
    checkpointed, plain = pair(kind)
    for model in (checkpointed, plain):
        with model.hooks(HOOKS):
            loss = model(leaf(), loss=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(checkpointed, plain)


@every_kind
def test_hooks_on_gradients(kind: str) -> None:
    seen: dict[type, list[Tensor]] = {}
    checkpointed, plain = pair(kind)
    for model in (checkpointed, plain):
        notes = seen.setdefault(type(model), [])
        keep = ("blocks.*.hook_p*", lambda gradient, hook, notes=notes: notes.append((hook.name, gradient)))
        with model.hooks([("blocks.1.hook_post", scale(2.0))], [keep, ("blocks.0.hook_post", scale(0.5))]):
            loss = model(leaf(), loss=True)
        loss.backward()
    assert_same_gradients(checkpointed, plain)
    assert [name for name, _ in seen[Checkpointed]] == [name for name, _ in seen[Net]]
    for (_, mine), (_, other) in zip(*seen.values(), strict=True):
        assert_close(mine, other)


@every_kind
def test_a_scope_inside_the_checkpointed_function(kind: str) -> None:
    """It is opened again with the recomputation: its hooks are those of the second time."""
    _, plain = pair(kind)
    checkpointed, opened = net(), []

    def inner(x: Tensor, model: Net) -> Tensor:
        factor = x.detach().mean() + 2
        opened.append(model)
        with model.hooks([("blocks.0.hook_post", lambda value, hook: factor * value * x.sum())]):
            return model(x)

    with checkpointed.hooks([("blocks.1.hook_post", scale(-1.0))]):
        out = KINDS[kind](lambda x: inner(x, checkpointed), leaf())
    with checkpointed.hooks([("blocks.1.hook_post", scale(7.0))]):
        out.square().sum().backward()
    with plain.hooks([("blocks.1.hook_post", scale(-1.0))]):
        inner(leaf(), plain).square().sum().backward()
    assert opened == [checkpointed, checkpointed, plain]
    assert_same_gradients(checkpointed, plain)
    del out
    assert_no_hook_left(checkpointed)
    assert checkpointed.context_level == 0


@every_kind
def test_sites_that_are_computed_only_for_a_listener(kind: str) -> None:
    checkpointed, plain = pair(kind)
    for model in (checkpointed, plain):
        with model.hooks([("blocks.*.hook_square", lambda value, hook: None)]):
            loss = model(leaf(), loss=True)
        loss.backward()
    assert [block.squares_computed for block in checkpointed.blocks] == [2, 2]
    assert_same_gradients(checkpointed, plain)


@every_kind
def test_a_cache_is_that_of_the_forward_pass(kind: str) -> None:
    checkpointed, plain = pair(kind)
    loss, cache = checkpointed.run_with_cache(leaf(), loss=True)
    before = dict(cache)
    loss.backward()
    assert all(cache[name] is before[name] for name in before)
    checkpointed.zero_grad()
    _, mine = checkpointed.run_with_cache(leaf(), loss=True, incl_bwd=True)
    _, other = plain.run_with_cache(leaf(), loss=True, incl_bwd=True)
    assert set(mine) == set(other)
    for name in other:
        assert_close(mine[name], other[name])


@every_kind
def test_hooks_stay_no_longer_than_the_graph(kind: str) -> None:
    model, _ = pair(kind)
    with model.hooks(HOOKS):
        loss = model(leaf(), loss=True)
    assert not any(point.is_listening for point in model.hook_points()), "nobody else sees them"
    assert torch.equal(model(leaf()), net()(leaf()))
    assert model.context_level == 0
    model.reset_hooks(including_permanent=True)
    twin = copy.deepcopy(model)
    assert_no_hook_left(twin)
    gc.disable()
    del loss
    gc.enable()
    assert_no_hook_left(model)


@every_kind
def test_a_handle_that_is_removed_before_the_backward_pass(kind: str) -> None:
    checkpointed, plain = pair(kind)
    for model in (checkpointed, plain):
        handle = model.hook_dict["blocks.0.hook_post"].add_hook(scale(0.0))
        loss = model(leaf(), loss=True)
        handle.remove()
        assert not model.hook_dict["blocks.0.hook_post"].has_hooks()
        loss.backward()
    assert_same_gradients(checkpointed, plain)


@every_kind
def test_hooks_that_change_within_one_checkpointed_call_are_refused(kind: str) -> None:
    model = net()
    point = model.hook_dict["blocks.0.hook_post"]
    handle = point.add_hook(scale(2.0))

    def twice(x: Tensor) -> Tensor:
        x = model(x)
        handle.remove()
        return model(x)

    out = KINDS[kind](twice, leaf())
    with pytest.raises(RuntimeError, match=r"'blocks.0.hook_post' changed .* checkpoint"):
        out.sum().backward()


@every_kind
@pytest.mark.parametrize("inside", [False, True])
def test_other_hooks_on_saved_tensors(kind: str, inside: bool) -> None:
    checkpointed, plain = net(), net()

    def saved_elsewhere(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return checkpointed(x, loss=True)

    with checkpointed.hooks(HOOKS):
        if inside:
            loss = KINDS[kind](saved_elsewhere, leaf())
        else:
            with torch.autograd.graph.save_on_cpu():
                loss = KINDS[kind](lambda x: checkpointed(x, loss=True), leaf())
    loss.backward()
    with plain.hooks(HOOKS):
        plain(leaf(), loss=True).backward()
    assert_same_gradients(checkpointed, plain)


@every_kind
def test_a_hook_on_a_gradient_may_run_the_model(kind: str) -> None:
    """It is no recomputation: it sees the scopes that are open around the backward pass."""
    model, _ = pair(kind)
    outs: list[Tensor] = []

    def again(gradient: Tensor, hook: HookPoint) -> None:
        with torch.enable_grad():
            outs.append(model(leaf()))

    with model.hooks(bwd_hooks=[("blocks.0.hook_post", again)]):
        loss = model(leaf(), loss=True)
    with model.hooks([("hook_out", scale(2.0)), ("blocks.0.hook_pre", scale(0.0))]):
        expected = model(leaf())
        loss.backward()
    assert len(outs) == 1
    assert torch.equal(outs[0], expected)


@every_kind
def test_a_wrapped_module_with_a_part_that_is_called_twice(kind: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Tensor, run: Run = lambda f, x: f(x)) -> Tensor:
            x = run(lambda y: torch.tanh(self.cell(y)), x)
            return run(lambda y: torch.tanh(self.cell(torch.tanh(self.cell(y)))), x)

    def second(value: Tensor, hook: HookPoint) -> Tensor:
        return {"cell": 2.0, "cell@1": 0.5, "cell@2": -1.0}[hook.name or ""] * value

    gradients = []
    for run in (KINDS[kind], lambda f, x: f(x)):
        torch.manual_seed(0)
        module = Twice()
        wrapped, x = wrap(module), leaf()
        with wrapped.hooks([("cell", second)]):
            out = wrapped(x, run)
        out.square().sum().backward(retain_graph=True)
        out.square().sum().backward()
        gradients.append((x.grad, module.cell.weight.grad))
        del out
        assert not module._forward_hooks
    for mine, other in zip(*gradients, strict=True):
        assert_close(mine, other)


def test_a_checkpoint_that_does_not_say_which_is_refused() -> None:
    """Were PyTorch's own code to change, an error has to say so, not other gradients."""
    model = net()

    class Unknown(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self) -> None:
            def pack_hook(x: Tensor) -> Tensor:
                return x

            pack_hook.__module__ = "torch.utils.checkpoint"
            super().__init__(pack_hook, lambda x: x)

    with (
        model.hooks(HOOKS),
        Unknown(),
        pytest.raises(RuntimeError, match=r"internals of torch\.utils\.checkpoint in torch"),
    ):
        model(leaf())


@pytest.mark.parametrize("name", ["unpack_hook", "checkpoint"])
def test_functions_of_a_checkpoint_without_the_variables_are_refused(name: str) -> None:
    """The same, where the frames of the call are on the stack."""
    source = f"def {name}(run):\n    gen = (x for x in ())\n    return run()\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, of_checkpoints._FILE, "exec"), namespace)
    with pytest.raises(RuntimeError, match=r"internals of torch\.utils\.checkpoint in torch"):
        namespace[name](lambda: of_checkpoints._on_the_stack(sys._getframe(1)))
