"""Which hooks are active here and now.

A `with model.hooks(...)` opens a Frame. The open frames of the running context (a thread, an asyncio task)
stand in one ContextVar; each hook point keeps the hooks that a frame put there under the frame itself. A hook
therefore runs only where its frame is open: other threads and tasks do not see it. Closing a frame removes it
from its points, so it is dead everywhere at once, also when frames are closed out of order or in another
context (as the garbage collector does with generators that nobody finished). What activation checkpointing runs
again sees what it saw the first time, see checkpoint.py.
"""

import asyncio
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import ContextDecorator
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from hooked_lm.hooks import checkpoint

# Held by whoever changes the hooks of a point, never by who reads them. The collector may close a scope at any moment, also in
# the midst of such a change: hence reentrant.
_writing = threading.RLock()

P = ParamSpec("P")
R = TypeVar("R")


def exclusive(change: Callable[P, R]) -> Callable[P, R]:
    """The same function, which no two threads run at once: for changes of hooks.

    An interrupt that came between the end of the change and the release of the lock would block all other threads for good.
    Python lets none in there, as both stand in one line and the release is no Python code.
    """

    @wraps(change)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _writing: return change(*args, **kwargs)  # fmt: skip # noqa: E701

    return alone


class Frame:
    """One open scope of hooks on one root module; its identity is all that matters.

    A closed frame has no root: it counts for nothing in the contexts that still list it, and keeps no model alive. `inside`
    are the checkpointed calls that were under way when it was opened.
    """

    __slots__ = ("inside", "is_of_pool", "root")

    def __init__(self, root: object) -> None:
        self.root: object | None = root
        self.is_of_pool = _is_of_pool(threading.current_thread())
        self.inside: tuple[Any, ...] = ()

    def is_inside(self, call: object) -> bool:
        """Whether the scope was opened inside of a checkpointed call, which opens it again when it is recomputed."""
        return any(call is other for other in self.inside)


Owner = (
    Frame | checkpoint.Seen | None
)  # whose hooks a point keeps: of a scope, of a recomputation, or those added by hand
_open_frames: ContextVar[tuple[Frame, ...]] = ContextVar("open_frames", default=())


def current() -> tuple[Frame, ...]:
    """The frames open in this context, outermost first."""
    return _open_frames.get()


def visible(calls: checkpoint.Calls | None) -> tuple[Owner, ...]:
    """Whose hooks count here and now, given the checkpointed calls under way."""
    if calls is None or calls.recomputed is None:
        return (None, *_open_frames.get())
    seen = checkpoint.seen_in_forward(calls)
    inner = (frame for frame in _open_frames.get() if frame.is_inside(calls.recomputed))
    return (*([] if seen is None else [seen]), *inner)


def push(frame: Frame) -> None:
    """Open a frame in this context."""
    if calls := checkpoint.under_way():
        frame.inside = (calls.recomputed, *calls.forward)
    still_open = (f for f in _open_frames.get() if f.root is not None)
    _open_frames.set((*still_open, frame))


def drop(frame: Frame) -> None:
    """Close a frame, whichever contexts list it."""
    frame.root, frame.inside = None, ()
    _open_frames.set(tuple(f for f in _open_frames.get() if f is not frame))


def depth(root: object) -> int:
    """How many scopes of this root are open here."""
    return sum(frame.root is root for frame in _open_frames.get())


# ---- threads and tasks -------------------------------------------------------------------------------------------------

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_count = itertools.count(1)


def runner() -> int:
    """A number of the running thread or asyncio task."""
    loop = asyncio._get_running_loop()
    return _number(threading.current_thread() if loop is None else asyncio.current_task(loop) or loop)


@exclusive
def _number(who: object) -> int:
    if who not in _numbers:
        _numbers[who] = next(_count)
    return _numbers[who]


def _is_of_pool(thread: threading.Thread) -> bool:
    """Whether a thread works through what others submit: such work was perhaps meant to run where it was submitted."""
    return getattr(getattr(thread, "_target", None), "__module__", None) in (
        "concurrent.futures.thread",
        "multiprocessing.pool",
    )


def tell_of_pool(name: str | None, owners: list[Owner]) -> None:
    """Warn once if a thread of a pool runs a point past the hooks of a block that is open in a thread of another kind."""
    thread = threading.current_thread()
    for frame in owners:
        if isinstance(frame, Frame) and frame.root is not None and not frame.is_of_pool and _is_of_pool(thread):
            frame.is_of_pool = True
            warnings.warn(
                f"'{name}' runs in '{thread.name}', a thread of a pool, without the hooks of a `with model.hooks(...)` block "
                "that is open in another thread: hooks belong to the thread that opened them. If the work was submitted from "
                "that block, submit(contextvars.copy_context().run, model, ...) carries them over; those of add_hook are seen "
                "by all threads",
                stacklevel=5,
            )


# ---- the context manager -----------------------------------------------------------------------------------------------


class Scope(ContextDecorator):
    """The block of `with model.hooks(...)`; it also decorates functions.

    Whatever happens while it opens, inside, or while it closes, its hooks end with it; if nobody closes it, when it is collected.
    """

    def __init__(self, root: Any, fwd_hooks: Any, bwd_hooks: Any, stays: bool, clear_contexts: bool) -> None:
        self._given = (root, fwd_hooks, bwd_hooks, stays, clear_contexts)
        self._held: Any = None

    def _recreate_cm(self) -> "Scope":
        return Scope(*self._given)  # a decorated function opens one at each call

    def __enter__(self) -> Any:
        root, fwd_hooks, bwd_hooks, stays, clear_contexts = self._given
        if self._held is not None and self._held.gi_frame is not None:
            raise RuntimeError("this scope of hooks is open already; call model.hooks(...) for each with block")
        level = None if stays else root.context_level + 1
        plan = root.plan_hooks(fwd_hooks, "fwd", level) + root.plan_hooks(bwd_hooks, "bwd", level)
        self._held = _hold(root, plan, level, clear_contexts)
        try:
            next(self._held)
            return root
        except BaseException:
            self._held.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._held.close()  # nothing before it: an interrupt there would leave the hooks

    def run(self, function: Callable[[], Any]) -> Any:
        """What a function returns inside the block, which has ended wherever an interrupt comes."""
        try:
            with self:
                return function()
        finally:
            if self._held is not None:
                self._held.close()


def _hold(root: Any, plan: list[Any], level: int | None, clear_contexts: bool) -> Generator[None, None, None]:
    """Keep hooks active until this generator is closed, as Python also does when it is collected."""
    frame, points, opener = Frame(root), dict.fromkeys(point for point, _ in plan), runner()
    is_open, is_closed = False, False

    def close() -> None:
        nonlocal is_closed
        drop(frame)
        for point in points:
            point.uninstall(frame)
        if not is_open:  # of those that were to stay, none do
            for point, hook in plan:
                point.discard(hook)
        if level is not None:
            for point in root.hook_points():
                point.end_level(level, opener)
        if clear_contexts:
            root.clear_contexts()
        is_closed = True

    try:
        try:
            push(frame)
            for point, hook in plan:
                point.install(hook, None if level is None else frame)
            is_open = True
            yield
        finally:
            close()
    finally:
        if not is_closed:  # interrupted in the midst of it
            close()
