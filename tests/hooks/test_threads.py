"""Hooks and threads: no hook is lost or runs in another thread, and work submitted from a block to a pool warns."""

import asyncio
import contextvars
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch

from hooked_lm.hooks import wrap
from tests.hooks.nets import assert_no_hook_left, net, some_input


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def nothing(value: Any, hook: Any) -> None:
    """A hook that does nothing."""


def in_threads(n: int, function: Callable[[int], Any]) -> list[Any]:
    """What a function returns for each of n threads that start together; raises what one of them raises."""
    start = threading.Barrier(n, timeout=60)

    def run(i: int) -> Any:
        start.wait()
        return function(i)

    with ThreadPoolExecutor(n) as pool:
        return [future.result() for future in [pool.submit(run, i) for i in range(n)]]


# ---- one point, many writers ---------------------------------------------------------------------------------------


def test_no_hook_is_lost_when_several_add_at_once(hasty: None) -> None:
    model = net()
    in_threads(8, lambda i: [model.hook_in.add_hook(nothing) for _ in range(200)])
    assert len(model.hook_in.fwd_hooks) == 8 * 200


def test_no_removal_brings_back_or_takes_another(hasty: None) -> None:
    model = net()
    kept = model.hook_in.add_hook(nothing)

    def come_and_go(i: int) -> None:
        for _ in range(200):
            handle = model.hook_in.add_hook(nothing)
            assert handle in model.hook_in.fwd_hooks
            handle.remove()
            assert handle not in model.hook_in.fwd_hooks

    in_threads(8, come_and_go)
    assert model.hook_in.fwd_hooks == [kept]


def test_registrations_from_several_threads(hasty: None) -> None:
    model = net()

    def come_and_go(i: int) -> None:
        for _ in range(150):
            hook_id = model.register(("hook_*", nothing))
            assert hook_id in model.registered()
            model.unregister(hook_id)
            assert hook_id not in model.registered()

    in_threads(6, come_and_go)
    assert model.registered() == {}
    assert_no_hook_left(model)


@pytest.mark.slow
def test_asking_what_is_registered_changes_nothing(hasty: None) -> None:
    model, stop = net(), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            model.registered()

    query_rows = threading.Thread(target=ask)
    query_rows.start()
    ids = in_threads(4, lambda i: [model.register(("hook_in", nothing)) for _ in range(150)])
    stop.set()
    query_rows.join()
    assert set(model.registered()) == {hook_id for some in ids for hook_id in some}
    for some in ids:
        for hook_id in some:
            model.unregister(hook_id)
    assert_no_hook_left(model)


def test_a_reset_beside_registrations_leaves_each_hook_listed_or_gone(hasty: None) -> None:
    model = net()

    def run(i: int) -> None:
        for _ in range(100):
            if i % 2:
                model.reset_hooks(including_permanent=True)
            else:
                model.register(("hook_in", nothing))

    in_threads(4, run)
    assert len(model.registered()) == len(model.hook_in.fwd_hooks)
    for hook_id in model.registered():
        model.unregister(hook_id)
    assert_no_hook_left(model)


def test_taps_on_modules_from_several_threads(hasty: None) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    wrapped, x, expected = wrap(module), some_input(), None
    expected = 2 * module(x)

    def run(i: int) -> None:
        for _ in range(50):
            out = wrapped.run_with_hooks(x, fwd_hooks=[("1", lambda value, hook: 2 * value)])
            assert torch.equal(out, expected)

    in_threads(4, run)
    assert not any(m._forward_hooks for m in module.modules())


# ---- levels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_the_end_of_a_scope_leaves_what_other_threads_added_by_hand(depth: int) -> None:
    model = net()
    seen: list[str] = []
    opened, ended = threading.Event(), threading.Event()

    def other() -> None:
        with model.hooks():
            with model.hooks():
                model.hook_in.add_hook(lambda value, hook: seen.append("theirs"), level=depth)
                opened.set()
                assert ended.wait(60)
                model(some_input())
            model(some_input())

    thread = threading.Thread(target=other)
    thread.start()
    assert opened.wait(60)
    model.hook_in.add_hook(lambda value, hook: seen.append("mine"), level=depth)
    with model.hooks(), model.hooks():
        pass
    ended.set()
    thread.join()
    assert seen == ["theirs"] * (3 - depth), "until the end of their scope of this depth"
    assert_no_hook_left(model)


def test_the_end_of_a_scope_leaves_what_other_tasks_added_by_hand() -> None:
    model, seen = net(), []

    async def one() -> None:
        with model.hooks():
            model.hook_in.add_hook(lambda value, hook: seen.append("one"), level=1)
            await asyncio.sleep(0.01)
            model(some_input())

    async def two() -> None:
        with model.hooks():
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(one(), two())

    asyncio.run(main())
    assert seen == ["one"]
    assert_no_hook_left(model)


# ---- pools -----------------------------------------------------------------------------------------------------------

DOUBLE = [("hook_in", lambda value, hook: 2 * value)]


def test_work_of_a_pool_is_told_that_it_lacks_the_hooks_of_the_block() -> None:
    model = net()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model, some_input()).result()
        with model.hooks(DOUBLE):
            with pytest.warns(UserWarning, match=r"'hook_in' .* thread of a pool.*copy_context"):
                out = pool.submit(model, some_input()).result()
            assert torch.equal(out, net()(some_input()))
            pool.submit(model, some_input()).result()  # one warning for each block
        pool.submit(model, some_input()).result()
    with ThreadPool(1) as pool, model.hooks(DOUBLE), pytest.warns(UserWarning, match="thread of a pool"):
        pool.apply(model, (some_input(),))


def test_what_carries_the_context_over_sees_the_hooks() -> None:
    model = net()
    with ThreadPoolExecutor(2) as pool, model.hooks(DOUBLE):
        futures = [pool.submit(contextvars.copy_context().run, model, some_input()) for _ in range(4)]
        assert all(torch.equal(future.result(), net()(2 * some_input())) for future in futures)

    async def main() -> torch.Tensor:
        with model.hooks(DOUBLE):
            return await asyncio.to_thread(model, some_input())

    assert torch.equal(asyncio.run(main()), net()(2 * some_input()))
    assert_no_hook_left(model)


def test_threads_that_keep_to_themselves_are_told_nothing() -> None:
    model = net()

    def own(i: int) -> Any:
        return model.run_with_hooks(some_input(), fwd_hooks=[("hook_in", lambda value, hook: i * value)])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outs = in_threads(4, own)
        with model.hooks(DOUBLE):
            thread = threading.Thread(target=lambda: outs.append(model(some_input())))
            thread.start()
            thread.join()
    for i, out in enumerate(outs[:4]):
        assert torch.equal(out, net()(i * some_input()))
    assert torch.equal(outs[4], net()(some_input()))
