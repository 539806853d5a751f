"""Hooks under activation checkpointing: the recomputation sees what the forward pass saw.

`torch.utils.checkpoint` runs a function a second time, in the backward pass: after the `with` block of the hooks may be over,
in another thread (autograd's own, on a GPU), or under other hooks. So each checkpointed call keeps the hooks that its points
saw the first time, for as long as its part of the graph lives, and a recomputation sees these, and the scopes that are opened
inside of it. Other implementations that run the function in an `autograd.Function` are treated alike.

Which checkpointed calls are under way is read from the Python stack, but only where PyTorch says that there may be one: in a
backward pass, inside an autograd function, or under hooks on saved tensors.
"""

import inspect
import sys
import weakref
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction

_FILE = torch.utils.checkpoint.__file__
_BACKWARD_PASS = torch.autograd.graph._engine_run_backward.__code__


class Seen:
    """The hooks that the forward pass of one checkpointed call saw; each point keeps its own under this object.

    `changed` are the points that saw other hooks in a later call of the same forward pass, and `calls` which calls of a
    module in a run they were.
    """

    def __init__(self) -> None:
        self.points: dict[Any, None] = {}
        self.changed: set[Any] = set()
        self.calls: dict[Any, list[int]] = {}
        self.repeated: dict[tuple[Any, int], int] = {}

    def end(self) -> None:
        """The graph is gone, nobody recomputes it."""
        for point in list(self.points):
            point.uninstall(self)

    def next_call(self, point: Any) -> int:
        """Which call of a module the recomputation has reached, when asked for each in turn."""
        turn = (point, torch._C._current_graph_task_id())
        self.repeated[turn] = i = self.repeated.get(turn, -1) + 1
        return self.calls[point][i]


class Calls(NamedTuple):
    """The checkpointed calls under way: the innermost that is recomputed, and those inside of it in their forward pass."""

    recomputed: Any
    forward: tuple[Any, ...]


# The node of the graph, or PyTorch's record of a call -> what was seen there.
_seen: weakref.WeakKeyDictionary[Any, Seen] = weakref.WeakKeyDictionary()


def under_way() -> Calls | None:
    """The checkpointed calls that the running code is part of; None if there are none."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None and torch._C._current_graph_task_id() == -1 and not _in_autograd_function():
        return None
    calls = _on_the_stack(sys._getframe(1))
    if hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__:
        call = _call_of(hooks[0])
        if call is not calls.recomputed and call not in calls.forward:
            calls = calls._replace(forward=(call, *calls.forward))
    return calls if calls.forward or calls.recomputed is not None else None


def is_recomputing() -> bool:
    """Whether the running code is the second run of a checkpointed call."""
    calls = under_way()
    return calls is not None and calls.recomputed is not None


def seen_in_forward(calls: Calls | None) -> Seen | None:
    """What the forward pass of the call saw that is recomputed; None if none is, or if it saw no hooks."""
    return None if calls is None or calls.recomputed is None else _seen.get(calls.recomputed)


def seen_in(call: Any) -> Seen:
    """The same while the forward pass runs, made when it is first asked for."""
    if call not in _seen:
        _seen[call] = seen = Seen()
        weakref.finalize(call, seen.end).atexit = False
    return _seen[call]


def _in_autograd_function() -> bool:
    """Whether this is the forward pass of an `autograd.Function`: there PyTorch forbids forward-mode derivatives."""
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def _on_the_stack(frame: FrameType | None) -> Calls:
    forward: list[Any] = []
    node: Any = torch._C._current_autograd_node()
    while (
        frame is not None and frame.f_code is not _BACKWARD_PASS
    ):  # beyond it a hook on a gradient runs on its own account
        code = frame.f_code
        if code.co_filename == _FILE and code.co_name == "unpack_hook":
            return Calls(frame.f_locals["frame"], tuple(forward))
        if code.co_filename == _FILE and code.co_name == "checkpoint" and (running := frame.f_locals.get("gen")):
            forward.append(running.gi_frame.f_locals["new_frame"])
        elif code.co_varnames[:1] == ("ctx",) and isinstance(ctx := frame.f_locals.get("ctx"), BackwardCFunction):
            if ctx is node:
                return Calls(ctx, tuple(forward))
            forward.append(ctx)
        frame = frame.f_back
    return Calls(None, tuple(forward))


def _call_of(pack_hook: Any) -> Any:
    """The call that PyTorch saves tensors for, in its forward pass or its recomputation."""
    function = inspect.unwrap(pack_hook)
    values = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "frame" in values:
        return values["frame"].cell_contents
    if "target_frame_ref" in values:
        return values["target_frame_ref"].cell_contents()
    raise RuntimeError(
        f"hooks cannot be carried to the recomputation of torch.utils.checkpoint of torch {torch.__version__}, which is "
        "built otherwise than expected; run the model without activation checkpointing, or with use_reentrant=True"
    )
