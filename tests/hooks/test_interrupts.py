"""Ctrl-C at every line of the package's hooks: nothing is left over, and hooks are added completely or not at all."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import pytest
import torch

import hooked_lm.hooks
from hooked_lm.hooks import HookedRootModule, HookPoint, module_points, wrap
from tests.hooks.nets import Net, assert_no_hook_left, net, some_input
from tests.interrupting import in_a_generator

FOLDER = str(Path(hooked_lm.hooks.__file__).parent)


def interrupted_at(n: int, action: Callable[[], Any]) -> bool:
    """Run something, with an interrupt at the n-th line of the folder; says whether it came so far."""
    lines = 0

    def at_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == n:
                raise KeyboardInterrupt
        return at_line

    before = sys.gettrace()
    gc.disable()  # an interrupt inside a callback of the collector would be swallowed
    sys.settrace(lambda frame, event, arg: at_line if frame.f_code.co_filename.startswith(FOLDER) else None)
    try:
        in_a_generator(action)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    assert lines < n
    return False


def at_every_line(action: Callable[[], Any], check: Callable[[], None], step: int = 1) -> int:
    """Interrupt at one line after the other until the action ends first; returns at how many."""
    n = 1
    while interrupted_at(n, action):
        check()
        n += step
    check()
    assert sys.exc_info() == (None, None, None), "an exception is still being handled"
    return n // step


def nothing(value: Any, hook: Any) -> None:
    """A hook that does nothing."""


class Early:
    """A hook object at the input of modules."""

    hook_point, when = "blocks.*.linear", "pre"

    def __call__(self, value: Any, hook: HookPoint) -> None:
        """Do nothing."""


def in_block(model: Net) -> None:
    with model.hooks([("hook_*", nothing), Early()], clear_contexts=True):
        pass


SCOPES: dict[str, Callable[[Net], Any]] = {
    "with": in_block,
    "nested": lambda model: model.hooks([("hook_in", nothing)])(lambda: in_block(model))(),
    "hooks": lambda model: model.run_with_hooks(
        some_input(), loss=True, fwd_hooks=[("hook_in", nothing), Early()], bwd_hooks=[("hook_in", nothing)]
    ).backward(),
    "cache": lambda model: model.run_with_cache(some_input(), loss=True, incl_bwd=True, names_filter=["hook_in"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCOPES)
def test_scopes_end(name: str) -> None:
    model = net()

    def check() -> None:
        assert_no_hook_left(model)
        assert model.context_level == 0
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert module_points.calls_so_far.get() is None

    assert at_every_line(lambda: SCOPES[name](model), check, step=1 if name == "with" else 7) > 50


ADDING: dict[str, tuple[int, Callable[[Net], Any]]] = {
    "by name": (4, lambda model: model.add_hook(["hook_in", "hook_left", "hook_right", "hook_out"], nothing)),
    "both ways": (2, lambda model: model.hook_in.add_hook(nothing, dir="both")),
    "caching": (4, lambda model: model.add_caching_hooks(["hook_in", "hook_out"], incl_bwd=True)),
    "to modules": (2, lambda model: model.add_hook("blocks.*.linear", Early())),
    "registering": (4, lambda model: model.register((["hook_in", "hook_left", "hook_right", "hook_out"], nothing))),
    "to stay": (
        2,
        lambda model: model.hooks([("hook_in", nothing), ("hook_out", nothing)], reset_hooks_end=False)(int)(),
    ),
}


@pytest.mark.parametrize("name", ADDING)
def test_what_is_added_is_added_whole_or_not_at_all(name: str) -> None:
    model = net()
    whole, add = ADDING[name]
    counts: set[int] = set()

    def check() -> None:
        counts.add(sum(map(len, model.list_hooks().values())))
        assert len(model.registered()) == (name == "registering") * (sum(map(len, model.list_hooks().values())) > 0)
        model.reset_hooks(including_permanent=True)
        assert_no_hook_left(model)
        assert not any(m._forward_pre_hooks for m in model.modules())

    at_every_line(lambda: add(model), check)
    assert counts == {0, whole}


def test_a_module_that_is_wrapped() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    wrapped, x = wrap(module), some_input()
    expected = 2 * module(x)
    hooks: Any = [("1", lambda value, hook: 2 * value)]

    def check() -> None:
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
        assert module_points.calls_so_far.get() is None
        assert torch.equal(wrapped.run_with_hooks(x, fwd_hooks=hooks), expected), "once, not twice"

    assert at_every_line(lambda: wrapped.run_with_hooks(x, fwd_hooks=hooks), check, step=2) > 50


def test_a_point_with_a_forward_of_its_own() -> None:
    class Own(HookPoint):
        def forward(self, value: Any) -> Any:
            return value + len(self._forward_hooks)

    class Root(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.hook = Own()
            self.setup()

        def forward(self, x: Any) -> Any:
            return self.hook(x)

    model = Root()

    def check() -> None:
        assert not model.hook._forward_hooks
        assert torch.equal(model(some_input()), some_input())

    at_every_line(lambda: model.run_with_hooks(some_input(), fwd_hooks=[("hook", nothing)]), check)


def test_an_interrupt_never_blocks_other_threads() -> None:
    """A lock that stays held would stop every other thread that adds a hook, for good."""
    model = net()

    def others_can_add() -> None:
        thread = Thread(target=lambda: model.add_hook("hook_left", nothing), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "the lock is still held"
        model.reset_hooks(including_permanent=True)

    def change() -> None:
        model.add_hook("hook_left", nothing)
        model.unregister(model.register(("hook_right", nothing)))
        with model.hooks([("hook_left", nothing)]):
            pass
        model.reset_hooks()

    assert at_every_line(change, others_can_add, step=3) > 50
