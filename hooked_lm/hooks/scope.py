"""Determines which hooks are active in the current thread or asyncio task.

A `with model.hooks(...)` block opens a Frame. A ContextVar holds the open frames of the current context (a thread or an
asyncio task), and each hook point stores hooks by frame. So a hook runs only where its frame is open; other threads and
tasks do not run it. Closing a frame removes it from its points, so its hooks end everywhere at once, also if frames are
closed out of order or in another context (as the garbage collector does with unfinished generators). Recomputations of
activation checkpointing run the hooks of their forward pass, see checkpoint.py.
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
from hooked_lm.hooks.hook_spec import HookList, hook_list, parse_hook
from hooked_lm.notebook_repr import NotebookRepr, Table, short_repr

# Held while the hooks of a point change; readers do not take it. Reentrant, because the garbage collector may close a scope at
# any moment, also during such a change.
_hooks_lock = threading.RLock()

P = ParamSpec("P")
R = TypeVar("R")


def synchronized(change: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that changes hooks, so that only one thread at a time runs any of them.

    An interrupt between the end of the change and the release of the lock would block all other threads forever. Python does
    not interrupt there, because both are on one line and the release is not Python code.
    """

    @wraps(change)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _hooks_lock: return change(*args, **kwargs)  # fmt: skip # noqa: E701

    return alone


class Frame:
    """One open scope of hooks on one root module, compared by identity.

    A closed frame has no root: contexts that still list it ignore it, and it keeps no model alive. `inside` are the
    checkpointed calls that were active when it was opened.
    """

    __slots__ = ("inside", "root", "warns_in_pool")

    def __init__(self, root: object) -> None:
        self.root: object | None = root
        self.warns_in_pool = not _is_pool_thread(threading.current_thread())
        self.inside: tuple[Any, ...] = ()

    def opened_inside(self, call: object) -> bool:
        """Whether the scope was opened inside of a checkpointed call, whose recomputation opens it again."""
        return any(call is other for other in self.inside)


# The key by which a point stores hooks: a scope, a checkpointed call, or None for those of `add_hook`.
Owner = Frame | checkpoint.CallRecord | None
_open_frames: ContextVar[tuple[Frame, ...]] = ContextVar("open_frames", default=())


def current() -> tuple[Frame, ...]:
    """The frames open in this context, outermost first."""
    return _open_frames.get()


def visible(calls: checkpoint.ActiveCalls | None) -> tuple[Owner, ...]:
    """The owners of the hooks that run here, given the active checkpointed calls."""
    if calls is None or calls.recomputed is None:
        return (None, *_open_frames.get())
    seen = checkpoint.record_to_replay(calls)
    inner = (frame for frame in _open_frames.get() if frame.opened_inside(calls.recomputed))
    return (*([] if seen is None else [seen]), *inner)


def push(frame: Frame) -> None:
    """Opens a frame in this context."""
    if calls := checkpoint.active_calls():
        frame.inside = (calls.recomputed, *calls.forward)
    still_open = (f for f in _open_frames.get() if f.root is not None)
    _open_frames.set((*still_open, frame))


def drop(frame: Frame) -> None:
    """Closes a frame in all contexts."""
    frame.root, frame.inside = None, ()
    _open_frames.set(tuple(f for f in _open_frames.get() if f is not frame))


def depth(root: object) -> int:
    """The number of scopes of this root that are open in this context."""
    return sum(frame.root is root for frame in _open_frames.get())


# ---- threads and tasks -------------------------------------------------------------------------------------------------

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_count = itertools.count(1)


def thread_or_task() -> int:
    """The number of the current thread or asyncio task."""
    loop = asyncio._get_running_loop()
    return _number(threading.current_thread() if loop is None else asyncio.current_task(loop) or loop)


@synchronized
def _number(who: object) -> int:
    if who not in _numbers:
        _numbers[who] = next(_count)
    return _numbers[who]


def _is_pool_thread(thread: threading.Thread) -> bool:
    """Whether a thread belongs to a pool and runs work that other threads submit."""
    return getattr(getattr(thread, "_target", None), "__module__", None) in (
        "concurrent.futures.thread",
        "multiprocessing.pool",
    )


def warn_in_pool_thread(name: str | None, owners: list[Owner]) -> None:
    """Warns once if a pool thread runs a point without the hooks of a block that is open in a thread outside the pool."""
    thread = threading.current_thread()
    for frame in owners:
        if isinstance(frame, Frame) and frame.root is not None and frame.warns_in_pool and _is_pool_thread(thread):
            frame.warns_in_pool = False
            warnings.warn(
                f"'{name}' runs in '{thread.name}', a thread of a pool, without the hooks of a `with model.hooks(...)` block "
                "that is open in another thread: hooks run only in the thread that opened the block. To run them in the pool, "
                "submit(contextvars.copy_context().run, model, ...) from inside the block, or use add_hook, whose hooks run in "
                "all threads",
                stacklevel=5,
            )


# ---- the context manager -----------------------------------------------------------------------------------------------


class Scope(NotebookRepr, ContextDecorator):
    """The context manager that `model.hooks(...)` returns; also a decorator of functions.

    Its hooks end with the block, also after errors and interrupts. If it is never closed, they end when it is garbage-collected.
    """

    def __init__(self, root: Any, fwd_hooks: HookList, bwd_hooks: HookList, stays: bool, clear_contexts: bool) -> None:
        self._given = (root, fwd_hooks, bwd_hooks, stays, clear_contexts)
        self._open: Any = None

    def _recreate_cm(self) -> "Scope":
        return Scope(*self._given)  # a decorated function opens a new scope in each call

    def __enter__(self) -> Any:
        root, fwd_hooks, bwd_hooks, stays, clear_contexts = self._given
        if self._open is not None and self._open.gi_frame is not None:
            raise RuntimeError("this scope of hooks is already open; call model.hooks(...) for each with block")
        level = None if stays else root.context_level + 1
        plan = root.plan_hooks(fwd_hooks, "fwd", level) + root.plan_hooks(bwd_hooks, "bwd", level)
        self._open = _installed(root, plan, level, clear_contexts)
        try:
            next(self._open)
            return root
        except BaseException:
            self._open.close()
            raise

    def repr_table(self) -> Table:
        """The hooks that were given: their sites, directions and functions."""
        rows: list[tuple[str, str, str]] = []
        for given, direction in zip(self._given[1:3], ("fwd", "bwd"), strict=True):
            rows += [_in_words(hook, direction) for hook in hook_list(given)]
        return Table(("site", "direction", "hook"), rows)

    def __repr__(self) -> str:
        fwd, bwd = (len(hook_list(given)) for given in self._given[1:3])
        is_open = self._open is not None and self._open.gi_frame is not None
        n_hooks = f"{fwd} forward hook{'s' * (fwd != 1)}" + (f", {bwd} backward" if bwd else "")
        return f"Scope({n_hooks}{'; open' if is_open else ''})"

    def __exit__(self, *_: object) -> None:
        self._open.close()  # must come first: an interrupt before it would leave the hooks

    def run(self, function: Callable[[], Any]) -> Any:
        """Returns `function()`, called inside the block; the block also ends after an interrupt."""
        try:
            with self:
                return function()
        finally:
            if self._open is not None:
                self._open.close()


def _in_words(hook: object, direction: str) -> tuple[str, str, str]:
    """The site, direction and function of a hook; the hook alone if it is none, of which `with` tells."""
    try:
        site, function, to, _ = parse_hook(hook, direction)
    except (TypeError, ValueError):
        return "", direction, short_repr(hook)
    return short_repr(site), to, getattr(function, "__name__", short_repr(function))


def _installed(root: Any, plan: list[Any], level: int | None, clear_contexts: bool) -> Generator[None, None, None]:
    """A generator that keeps hooks active until it is closed or garbage-collected."""
    frame, points, opener = Frame(root), dict.fromkeys(point for point, _ in plan), thread_or_task()
    is_open, is_closed = False, False

    def close() -> None:
        nonlocal is_closed
        drop(frame)
        for point in points:
            point.uninstall(frame)
        if not is_open:  # opening failed: remove the hooks that should have stayed after the block, too
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
        if not is_closed:  # `close` was interrupted
            close()
