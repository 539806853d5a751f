"""Who sees which hook: random programs of scopes against a reference, generators, threads, tasks, Ctrl-C."""

import asyncio
import contextlib
import contextvars
import gc
import signal
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hooked_lm.hooks import HookPoint, scope
from tests.hooks.nets import SITES, Net, assert_no_hook_left, net, some_input
from tests.unchecked import unchecked


def in_thread(function: Any) -> Any:
    """Returns the function's result in a new thread, whose context is empty."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()), daemon=True)
    thread.start()
    thread.join()
    return result[0]


# ---- random programs against a reference -----------------------------------------------------------------------


@dataclass
class Expected:
    """A hook as the reference knows it."""

    order: int
    site: int
    permanent: bool = False
    level: int | None = None
    handle: Any = None


@dataclass
class Opened:
    context: Any
    level: int
    hooks: list[Expected] = field(default_factory=list)


class World:
    """A model, and beside it what should be seen: hooks added by hand, and the open scopes in a plain list."""

    def __init__(self) -> None:
        self.model, self.log, self.clock = net(), [], 0
        self.plain = self.model(some_input())
        self.by_hand: list[Expected] = []
        self.opened: list[Opened] = []

    def hook(self, site: int, prepend: bool = False) -> tuple[Expected, Any]:
        self.clock += 1
        expected = Expected(-self.clock if prepend else self.clock, site % len(SITES))
        return expected, lambda value, hook: self.log.append((hook.name, expected.order))

    def seen_with(self, hooks: list[Expected]) -> list[tuple[str, int]]:
        return [
            (site, hook.order)
            for number, site in enumerate(SITES)
            for hook in sorted(hooks, key=lambda hook: hook.order)
            if hook.site == number
        ]

    def check(self, everything: bool = True) -> None:
        self.log.clear()
        assert torch.equal(self.model(some_input()), self.plain)
        scoped = [hook for frame in self.opened for hook in frame.hooks] if everything else []
        assert self.log == self.seen_with(self.by_hand + scoped)
        assert self.model.context_level == (len(self.opened) if everything else 0)

    def forget_level(self, level: int) -> None:
        self.by_hand = [hook for hook in self.by_hand if hook.permanent or hook.level != level]

    # ---- the moves of a program

    def open(self, sites: list[int]) -> None:
        pairs = [self.hook(site) for site in sites]
        context = self.model.hooks([(SITES[expected.site], function) for expected, function in pairs])
        context.__enter__()
        self.opened.append(Opened(context, len(self.opened) + 1, [expected for expected, _ in pairs]))

    def close(self, which: int, how: str) -> None:
        if not self.opened:
            return
        frame = self.opened.pop(which % len(self.opened))
        if how == "exit":
            frame.context.__exit__(None, None, None)
        elif how == "error":
            error = KeyError("x")
            assert not frame.context.__exit__(KeyError, error, None)
        elif how == "elsewhere":
            in_thread(lambda: frame.context.__exit__(None, None, None))
        else:
            frame.context = None
            gc.collect(0)
        self.forget_level(frame.level)

    def add(self, site: int, prepend: bool, permanent: bool, level: int | None) -> None:
        expected, function = self.hook(site, prepend)
        expected.permanent, expected.level = permanent, level
        point = self.model.hook_dict[SITES[expected.site]]
        expected.handle = point.add_hook(function, is_permanent=permanent, level=level, prepend=prepend)
        self.by_hand.append(expected)

    def remove(self, which: int) -> None:
        if self.by_hand:
            self.by_hand.pop(which % len(self.by_hand)).handle.remove()

    def reset(self, permanent: bool, level: int | None) -> None:
        self.model.reset_hooks(including_permanent=permanent, level=level)

        def stays(hook: Expected) -> bool:
            return (hook.permanent and not permanent) or level not in (None, hook.level)

        self.by_hand = list(filter(stays, self.by_hand))
        for frame in self.opened:
            frame.hooks = [hook for hook in frame.hooks if level not in (None, frame.level)]

    def break_in(self, site: int, interrupt: bool) -> None:
        error = KeyboardInterrupt if interrupt else ZeroDivisionError

        def broken(value: Any, hook: Any) -> None:
            raise error

        level = len(self.opened) + 1
        with pytest.raises(error):
            self.model.run_with_hooks(some_input(), fwd_hooks=[(SITES[site % len(SITES)], broken)])
        self.forget_level(level)

    def watch(self, where: str) -> None:
        """Run the model in another context: a thread sees nothing of our scopes, a copied context everything."""
        if where == "thread":
            in_thread(lambda: self.check(everything=False))
        elif where == "copy":
            contextvars.copy_context().run(self.check)
        else:

            async def task() -> None:
                self.check()

            asyncio.run(task())

    def finish(self) -> None:
        while self.opened:
            self.close(0, "exit")
        self.model.reset_hooks(including_permanent=True)
        self.by_hand.clear()
        self.check()
        assert_no_hook_left(self.model)
        assert self.model.context_level == 0


number = st.integers(0, 9)
level = st.none() | st.integers(1, 3)
opening = st.tuples(st.just("open"), st.lists(number, min_size=1, max_size=3))
closing = st.tuples(st.just("close"), number, st.sampled_from(["exit", "error", "elsewhere", "abandon"]))
move = st.one_of(
    opening,
    opening,
    closing,
    closing,
    st.tuples(st.just("add"), number, st.booleans(), st.booleans(), level),
    st.tuples(st.just("remove"), number),
    st.tuples(st.just("reset"), st.booleans(), level),
    st.tuples(st.just("break_in"), number, st.booleans()),
    st.tuples(st.just("watch"), st.sampled_from(["thread", "copy", "task"])),
)


@settings(max_examples=200)
@given(program=st.lists(move, min_size=5, max_size=25))
def test_random_programs_see_what_the_reference_says(program: list[tuple[Any, ...]]) -> None:
    def run() -> None:
        world = World()
        for name, *arguments in program:
            getattr(world, name)(*arguments)
            world.check()
        world.finish()

    contextvars.copy_context().run(run)


# ---- generators ------------------------------------------------------------------------------------------------


def listener(model: Net, seen: list[str], name: str) -> Any:
    with model.hooks([("hook_in", lambda value, hook: seen.append(name))]):
        while True:
            yield model(some_input())


@given(order=st.permutations(range(4)), abandoned=st.sets(st.integers(0, 3)))
def test_generators_end_in_any_order_or_never(order: list[int], abandoned: set[int]) -> None:
    model, seen = net(), []
    alive = {i: listener(model, seen, str(i)) for i in range(4)}
    for generator in alive.values():
        next(generator)
    for i in order:
        generator = alive.pop(i)
        if i not in abandoned:
            generator.close()
        del generator
        seen.clear()
        model(some_input())
        assert seen == [str(i) for i in sorted(alive)]
    assert_no_hook_left(model)


def test_a_generator_collected_in_another_thread_leaves_nothing() -> None:
    model, seen = net(), []
    held = [listener(model, seen, "x")]
    next(held[0])
    assert model.context_level == 1
    in_thread(held.clear)
    assert_no_hook_left(model)
    assert model.context_level == 0


def test_a_frame_closed_elsewhere_keeps_no_model_alive() -> None:
    import weakref

    model = net()
    alive = weakref.ref(model)
    held = [listener(model, [], "x")]
    next(held[0])
    in_thread(held.clear)
    del model
    gc.collect()
    assert alive() is None


# ---- exceptions and Ctrl-C --------------------------------------------------------------------------------------


class Broken(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


@pytest.mark.parametrize("verb", ["run_with_hooks", "run_with_cache"])
def test_ctrl_c_in_forward(verb: str) -> None:
    model, plain = net(), net()(some_input())
    linear, model.blocks[1].linear = model.blocks[1].linear, Broken()
    pairs = [("blocks.*.hook_pre", lambda value, hook: 0 * value)]
    options = {"run_with_hooks": {"fwd_hooks": pairs, "bwd_hooks": pairs}, "run_with_cache": {"incl_bwd": True}}
    with pytest.raises(KeyboardInterrupt):
        getattr(model, verb)(some_input(), **options[verb])
    assert_no_hook_left(model)
    model.blocks[1].linear = linear
    assert torch.equal(model(some_input()), plain)


@unchecked()  # an interrupt inside jaxtyping would leave a table of sizes open, for all later tests
def test_real_ctrl_c_at_any_moment() -> None:
    """A timer interrupts runs wherever they happen to be: before, in, or after the scope's own code."""
    model, x = net(), some_input()
    plain, hits = model(x), 0

    def interrupt(number: int, frame: Any) -> None:
        if not any("weakref" in there.f_code.co_filename for there, _ in traceback.walk_stack(frame)):
            raise KeyboardInterrupt
        # Python swallows what a weak reference's callback raises: a little later
        signal.setitimer(signal.ITIMER_REAL, 1e-3)

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # and what a callback of the collector raises
    try:
        for i in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + 5e-6 * (i % 150))
                for _ in range(50):
                    with model.hooks([("*", lambda value, hook: None)], clear_contexts=True):
                        pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            assert_no_hook_left(model)
            assert model.context_level == 0
            assert not scope._hooks_lock._is_owned(), "other threads would wait for ever"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert hits > 100
    assert torch.equal(model(x), plain)


def test_an_error_in_the_list_of_hooks_opens_nothing() -> None:
    model = net()
    with pytest.raises(KeyError), model.hooks([("hook_in", lambda v, hook: None), ("hook_im", lambda v, hook: None)]):
        pass
    with pytest.raises(TypeError), model.hooks([("hook_in", "no function")]):
        pass
    assert_no_hook_left(model)
    assert model.context_level == 0


# ---- threads and tasks ------------------------------------------------------------------------------------------


def test_two_threads_never_mix() -> None:
    model, x, wrong = net(), some_input(), []
    model.requires_grad_(False)
    factors = [0.5, 2.0]
    # before the threads start: nets are drawn from the process's one generator
    results = {factor: net().run_with_cache(factor * x) for factor in factors}
    ready = threading.Barrier(2, timeout=60)

    def run(mine: float) -> Any:
        def scale(value: torch.Tensor, hook: HookPoint) -> torch.Tensor:
            return mine * value

        expected, expected_cache = results[mine]
        ready.wait()
        for i in range(200):
            if i % 2:
                out = model.run_with_hooks(x, fwd_hooks=[("hook_in", scale)])
            else:
                with model.hooks([("hook_in", scale)]):
                    out, cache = model.run_with_cache(x)
                wrong.extend(n for n in cache if not torch.equal(cache[n], expected_cache[n]))
            if not torch.equal(out, expected) or model.hook_in.is_listening:
                wrong.append((mine, i))

    threads = [threading.Thread(target=run, args=(factor,)) for factor in factors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert_no_hook_left(model)


def test_listening_is_a_matter_of_context() -> None:
    model = net()
    square = model.blocks[0].hook_square
    with model.hooks([(square.name, lambda value, hook: None)]):
        assert square.is_listening
        assert not in_thread(lambda: square.is_listening)
        in_thread(lambda: model(some_input()))
        assert model.blocks[0].squares_computed == 0
        model(some_input())
        assert model.blocks[0].squares_computed == 1
    square.add_hook(lambda value, hook: None)
    assert in_thread(lambda: square.is_listening)


@settings(max_examples=30)
@given(plans=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=2, max_size=5))
def test_tasks_never_mix(plans: list[list[int]]) -> None:
    """Each task opens a scope, yields several times, and opens another inside; each runs only its own hooks."""
    model, x = net(), some_input()
    out = model(x)

    async def task(me: int, pauses: list[int]) -> None:
        seen: list[tuple[int, int]] = []
        with contextlib.ExitStack() as stack:
            for depth, pause in enumerate(pauses):
                mine = (me, depth)
                stack.enter_context(model.hooks([("hook_in", lambda v, hook, mine=mine: seen.append(mine))]))
                for _ in range(pause):
                    await asyncio.sleep(0)
                seen.clear()
                assert torch.equal(model(x), out)
                assert seen == [(me, d) for d in range(depth + 1)]
                assert model.context_level == depth + 1

    async def main() -> None:
        await asyncio.gather(*(task(i, pauses) for i, pauses in enumerate(plans)))

    asyncio.run(main())
    assert_no_hook_left(model)


def test_a_task_cancelled_inside_a_scope_leaves_nothing() -> None:
    model = net()

    async def waits() -> None:
        with model.hooks([("*", lambda value, hook: None)]):
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        assert model.hook_in._hooks
        assert not model.hook_in.is_listening
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert_no_hook_left(model)


# ---- nesting ----------------------------------------------------------------------------------------------------


def test_scopes_nest_on_one_point_and_run_in_order_of_registration() -> None:
    model = net()
    with model.hooks([("hook_in", lambda v, hook: v + 1)]):
        with model.hooks([("hook_in", lambda v, hook: v * 10)]):
            inner, cache = model.run_with_cache(some_input(), names_filter="hook_in")
            assert torch.equal(cache["hook_in"], (some_input() + 1) * 10)
        outer = model(some_input())
    assert torch.equal(inner, model((some_input() + 1) * 10))
    assert torch.equal(outer, model(some_input() + 1))


def test_a_hook_may_run_the_model_again() -> None:
    model, inner = net(), []

    def again(value: torch.Tensor, hook: HookPoint) -> None:
        if model.context_level == 1:
            inner.append(model.run_with_hooks(value, fwd_hooks=[("hook_out", lambda v, hook: v + 1)]))

    out = model.run_with_hooks(some_input(), fwd_hooks=[("hook_in", again)])
    assert torch.equal(out, model(some_input()))
    assert torch.equal(inner[0], out + 1)
    assert_no_hook_left(model)


def test_a_scope_that_ends_early_takes_nothing_of_a_later_one() -> None:
    """Out of order, the depths of the remaining scopes are no longer those they were opened at."""
    model, seen = net(), []
    first, second = listener(model, seen, "first"), listener(model, seen, "second")
    next(first), next(second)
    first.close()
    third = listener(model, seen, "third")
    next(third)
    third.close()
    seen.clear()
    next(second)
    assert seen == ["second"]
    second.close()


def test_reset_hooks_end_false_leaves_the_hooks_for_everybody() -> None:
    model = net()
    with model.hooks([("hook_in", lambda v, hook: 0 * v)], reset_hooks_end=False):
        pass
    assert torch.equal(in_thread(lambda: model(some_input())), model(0 * some_input()))
    assert model.hook_in.has_hooks()
    model.reset_hooks()
    assert_no_hook_left(model)


def test_clear_contexts_and_levels() -> None:
    model, seen = net(), []
    model.hook_out.add_hook(lambda v, hook: seen.append("hand"), level=1)
    model.hook_out.add_hook(lambda v, hook: seen.append("permanent"), is_permanent=True, level=1)

    def remember(value: torch.Tensor, hook: HookPoint) -> None:
        hook.ctx["sum"] = value.sum()

    with model.hooks():
        with model.hooks([("hook_in", remember)]):
            model(some_input())
        model(some_input())
        assert seen == ["hand", "permanent"] * 2
        assert "sum" in model.hook_in.ctx
    model.run_with_hooks(some_input(), fwd_hooks=[("hook_in", remember)], clear_contexts=True)
    assert seen == ["hand", "permanent"] * 2 + ["permanent"]
    assert model.hook_in.ctx == {}
