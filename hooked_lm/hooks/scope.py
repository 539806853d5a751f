"""Which hooks are active here and now.

A `with model.hooks(...)` opens a Frame. The open frames of the running context (a thread, an asyncio task)
stand in one ContextVar; each hook point keeps the hooks that a frame put there under the frame itself. A hook
therefore runs only where its frame is open: other threads and tasks do not see it. Closing a frame removes it
from its points, so it is dead everywhere at once, also when frames are closed out of order or in another
context (as the garbage collector does with generators that nobody finished).
"""

from contextvars import ContextVar


class Frame:
    """One open scope of hooks on one root module; its identity is all that matters.

    A closed frame has no root: it counts for nothing in the contexts that still list it, and keeps no model
    alive.
    """

    __slots__ = ("root",)

    def __init__(self, root: object) -> None:
        self.root: object | None = root


_open_frames: ContextVar[tuple[Frame, ...]] = ContextVar("open_frames", default=())


def current() -> tuple[Frame, ...]:
    """The frames open in this context, outermost first."""
    return _open_frames.get()


def push(frame: Frame) -> None:
    """Open a frame in this context."""
    still_open = (f for f in _open_frames.get() if f.root is not None)
    _open_frames.set((*still_open, frame))


def drop(frame: Frame) -> None:
    """Close a frame, whichever contexts list it."""
    frame.root = None
    _open_frames.set(tuple(f for f in _open_frames.get() if f is not frame))


def depth(root: object) -> int:
    """How many scopes of this root are open here."""
    return sum(frame.root is root for frame in _open_frames.get())
