"""Hooks under activation checkpointing: the recomputation runs the hooks of the forward pass.

`torch.utils.checkpoint` runs a function again in the backward pass: possibly after the `with` block of the hooks, in another
thread (autograd's, on a GPU), or under other hooks. So the hooks of each checkpointed call are recorded in its forward pass and
kept while its part of the graph is alive. A recomputation runs these hooks, and those of scopes opened inside of it. Other
implementations that run the function in an `autograd.Function` are treated in the same way.

PyTorch does not expose the active checkpointed calls. They are read from the Python stack, but only where there can be one: in
a backward pass, inside an autograd function, or under hooks on saved tensors.
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


class CallRecord:
    """The owner of the hooks that ran in the forward pass of one checkpointed call; each point stores its hooks by this key.

    `points` are the points with such hooks. `changed` are the points whose hooks changed during the checkpointed call.
    `calls` are, for each point, the numbers of its module's calls, counted over the run.
    """

    def __init__(self) -> None:
        self.points: dict[Any, None] = {}
        self.changed: set[Any] = set()
        self.calls: dict[Any, list[int]] = {}
        self.repeated: dict[tuple[Any, int], int] = {}

    def end(self) -> None:
        """Removes the hooks: the graph was freed, so nothing is recomputed."""
        for point in list(self.points):
            point.uninstall(self)

    def next_call(self, point: object) -> int:
        """The number of the module's call that the recomputation repeats; advances with each call of this method."""
        turn = (point, torch._C._current_graph_task_id())
        self.repeated[turn] = i = self.repeated.get(turn, -1) + 1
        return self.calls[point][i]


class ActiveCalls(NamedTuple):
    """The active checkpointed calls: the innermost one that is recomputed, and those inside of it in their forward pass."""

    recomputed: Any
    forward: tuple[Any, ...]


# A checkpointed call (its node in the graph, or PyTorch's record of it) -> the record of its hooks.
_records: weakref.WeakKeyDictionary[Any, CallRecord] = weakref.WeakKeyDictionary()


def active_calls() -> ActiveCalls | None:
    """The checkpointed calls that contain the running code; None if there are none."""
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
    """Whether the running code recomputes a checkpointed call."""
    calls = active_calls()
    return calls is not None and calls.recomputed is not None


def record_to_replay(calls: ActiveCalls | None) -> CallRecord | None:
    """The record of the call that is recomputed; None if there is no such call, or if it had no hooks."""
    return None if calls is None or calls.recomputed is None else _records.get(calls.recomputed)


def record_of(call: Any) -> CallRecord:
    """The record of a call in its forward pass, created on first use."""
    if call not in _records:
        _records[call] = seen = CallRecord()
        weakref.finalize(call, seen.end).atexit = False
    return _records[call]


def _in_autograd_function() -> bool:
    """Whether this is the forward pass of an `autograd.Function`, where PyTorch disables forward-mode derivatives."""
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def _on_the_stack(frame: FrameType | None) -> ActiveCalls:
    forward: list[Any] = []
    node: Any = torch._C._current_autograd_node()
    # frames outside of the backward pass do not belong to the checkpointed call
    while frame is not None and frame.f_code is not _BACKWARD_PASS:
        code = frame.f_code
        if code.co_filename == _FILE and code.co_name == "unpack_hook":
            return ActiveCalls(_local(frame, "frame"), tuple(forward))
        if code.co_filename == _FILE and code.co_name == "checkpoint" and (running := frame.f_locals.get("gen")):
            forward.append(_local(running.gi_frame, "new_frame"))
        elif code.co_varnames[:1] == ("ctx",) and isinstance(ctx := frame.f_locals.get("ctx"), BackwardCFunction):
            if ctx is node:
                return ActiveCalls(ctx, tuple(forward))
            forward.append(ctx)
        frame = frame.f_back
    return ActiveCalls(None, tuple(forward))


def _call_of(pack_hook: Any) -> Any:
    """The checkpointed call to which a saved-tensor hook belongs, in its forward pass or its recomputation."""
    function = inspect.unwrap(pack_hook)
    values = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "frame" in values:
        return values["frame"].cell_contents
    if "target_frame_ref" in values:
        return values["target_frame_ref"].cell_contents()
    raise _unknown_internals()


def _local(frame: FrameType, name: str) -> Any:
    """A local variable of a function of torch.utils.checkpoint."""
    if name not in frame.f_locals:
        raise _unknown_internals()
    return frame.f_locals[name]


def _unknown_internals() -> RuntimeError:
    return RuntimeError(
        f"hooks do not support the internals of torch.utils.checkpoint in torch {torch.__version__}; run the model without "
        "activation checkpointing, or with use_reentrant=True"
    )
