"""HookPoint: a named identity module where hooks read, edit and differentiate activations.

A point without listeners costs one check. A point stores hooks by the frame that installed them (see scope.py); hooks of
`add_hook` belong to the module and run in all threads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hooked_lm.hooks import checkpoint, generation_step, scope, token_labels
from hooked_lm.hooks.checkpoint import ActiveCalls, CallRecord
from hooked_lm.hooks.generation_step import GenerationStep
from hooked_lm.hooks.hook import Hook, HookFunction
from hooked_lm.hooks.hook_spec import direction_and_when
from hooked_lm.hooks.scope import Frame, Owner
from hooked_lm.hooks.values import can_have_gradient, copy_for_hook
from hooked_lm.notebook_repr import NotebookRepr, Table

_shows_name = ContextVar("shows_name", default=True)


@runtime_checkable
class HookConversion(Protocol):
    """Another form of a value, and the way back."""

    def convert(self, value: Tensor) -> Tensor: ...

    def revert(self, value: Tensor) -> Tensor: ...


class HookPoint(NotebookRepr, nn.Identity):
    """A named site in a network, which returns its input unless a hook changes it.

    A hook is called as `fn(value, hook=point)` with a copy of the value; consecutive hooks receive the same copy. It returns
    None (the copy is used, with in-place edits) or a new value of the same shape, dtype and device. A backward hook receives
    the gradient with respect to the value instead, and may return a tuple of one tensor.

    Args:
        dims: the names of the value's axes, in order, e.g. `("batch", "pos", "d_model")`; may be empty.
        on_demand: whether a cache without a filter omits this site, because it would multiply memory.

    >>> import torch
    >>> point = HookPoint("batch", "d_model")
    >>> handle = point.add_hook(lambda value, hook: 2 * value)
    >>> point(torch.ones(1, 3))
    tensor([[2., 2., 2.]])
    """

    hook_conversion: HookConversion | None = None  # set by `enable_reshape`
    own_step: GenerationStep | None = None  # of a point for a part of a prompt, which is like a step of generation
    columns: Any = None  # of a point for some query positions of its value: `QueryColumns`; see `columns.py`
    grows = True  # whether generation extends the sequence at this site; false for the source of an encoder-decoder

    def __init__(self, *dims: str, on_demand: bool = False) -> None:
        super().__init__()
        self.name: str | None = None
        self.dims = dims
        self.on_demand = on_demand
        self.ctx: dict[Any, Any] = {}
        # Hooks by owner: a Frame, None for `add_hook`, a CallRecord for a recomputation. Tuples, because readers take no lock.
        self._hooks: dict[Owner, tuple[Hook, ...]] = {}

    def __call__(self, value: Any) -> Any:
        """Calls the point; skips `nn.Module.__call__`, which is slow, if there are no PyTorch hooks."""
        if self._hooks and self._has_custom_forward():
            return self._run_after_custom_forward(value)
        return super().__call__(value) if self._has_torch_hooks() else self.forward(value)

    def forward(self, value: Any) -> Any:
        if not self._hooks or self._has_custom_forward():
            return value
        return self._run(value)

    def _has_custom_forward(self) -> bool:
        """Whether a subclass or the instance overrides `forward`."""
        return type(self).forward is not HookPoint.forward or "forward" in self.__dict__

    # ---- running -------------------------------------------------------------------------------------------

    def active_hooks(self, dir: str | None = None) -> list[Hook]:
        """The hooks that would run in this context, in order; of one direction, or of both."""
        if not self._hooks:
            return []
        calls = checkpoint.active_calls()
        owners = scope.visible(calls)
        hooks = [hook for owner in owners for hook in self._hooks.get(owner, ())]
        if calls is not None:
            self._record_for_recomputation(calls, owners)
        if len(self._hooks) > len(owners) or any(owner not in owners for owner in list(self._hooks)):
            scope.warn_in_pool_thread(self.name, [owner for owner in list(self._hooks) if owner not in owners])
        if len(hooks) > 1:
            hooks.sort(key=lambda hook: hook.order)
        return self._run_here(hooks if dir is None else [hook for hook in hooks if hook.dir == dir])

    def _run_here(self, hooks: list[Hook]) -> list[Hook]:
        """Those of these hooks that run in this process."""
        return hooks

    def _record_for_recomputation(self, calls: ActiveCalls, owners: Sequence[Owner]) -> None:
        """Records the hooks of this point for recomputations; raises RuntimeError if they changed within a checkpointed call."""
        point = self.__dict__.get("_original", self)
        seen = checkpoint.record_to_replay(calls)
        if seen is not None and point in seen.changed:
            raise RuntimeError(
                f"the hooks at '{self.name}' changed inside a checkpointed function, so its recomputation cannot tell which of "
                "them to run: add and remove hooks outside of the function"
            )
        for call in calls.forward:
            outer = [owner for owner in owners if not (isinstance(owner, Frame) and owner.opened_inside(call))]
            hooks = tuple(hook for owner in outer for hook in self._hooks.get(owner, ()))
            self._record_hooks(call, point, hooks)

    @scope.synchronized
    def _record_hooks(self, call: object, point: "HookPoint", hooks: tuple[Hook, ...]) -> None:
        seen = checkpoint.record_of(call)
        seen.points[point] = None
        if self._hooks.setdefault(seen, hooks) != hooks:
            seen.changed.add(point)

    @property
    def is_listening(self) -> bool:
        """Whether anything in this context needs the value; expensive sites are computed only then."""
        return self._has_torch_hooks() or bool(self._hooks and self.active_hooks())

    @property
    def is_edited(self) -> bool:
        """Whether anything in this context may change the value or needs its gradient; false for recorders of values."""
        return self._has_torch_hooks() or any(hook.dir == "bwd" or not hook.records for hook in self.active_hooks())

    @property
    def may_change(self) -> bool:
        """Whether anything in this context may change the value; false for recorders, and for hooks on the gradient."""
        return (
            bool(self._forward_hooks or self._forward_pre_hooks)
            or self._has_custom_forward()
            or any(not hook.records for hook in self.active_hooks("fwd"))
        )

    def _has_torch_hooks(self) -> bool:
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks)

    def enable_reshape(self, hook_conversion: HookConversion | None = None) -> None:
        """Hooks receive `hook_conversion.convert(value)`; what they make of it goes on as `hook_conversion.revert(...)`.

        None: hooks receive the value.

        >>> import torch
        >>> from types import SimpleNamespace
        >>> to, back = lambda value: value.flatten(1), lambda value: value.unflatten(1, (2, 3))
        >>> point = HookPoint("batch", "head", "d_head")
        >>> point.enable_reshape(SimpleNamespace(convert=to, revert=back))
        >>> handle = point.add_hook(lambda value, hook: print(tuple(value.shape)))
        >>> point(torch.ones(1, 2, 3)).shape
        (1, 6)
        torch.Size([1, 2, 3])
        """
        self.hook_conversion = hook_conversion

    def _run(self, value: Any) -> Any:
        hooks, conversion = self.active_hooks(), self.hook_conversion
        shown = changed = value if conversion is None else conversion.convert(value)
        if early := [hook for hook in hooks if hook.when == "pre"]:
            changed = self._run_in_order(changed, early)
            hooks = [hook for hook in hooks if hook.when != "pre"]
        changed = self._run_in_order(changed, hooks)
        if conversion is None:
            return changed
        return value if changed is shown else conversion.revert(changed)

    def _run_after_custom_forward(self, value: Any) -> Any:
        """Runs an overridden `forward`, which may check PyTorch's list of hooks, and then the hooks on its output."""
        if not self.active_hooks():
            return super().__call__(value)
        mark: Any = object()  # a key that PyTorch does not use
        try:
            try:
                self._forward_hooks[mark] = _do_nothing
                value = super().__call__(value)
            finally:
                self._forward_hooks.pop(mark, None)
        finally:  # an interrupt may skip the line above
            self._forward_hooks.pop(mark, None)
        return self._run(value)

    def _run_in_order(self, value: Any, hooks: list[Hook]) -> Any:
        """Runs hooks on a value, in order; hooks on the gradient receive that of the final value.

        Consecutive functions receive the same tensor, so a tensor that one of them keeps is in the graph of the next.
        """
        copy = None  # the copy that the previous function received, unless it returned another tensor
        for hook in hooks:
            if hook.dir != "fwd":
                continue
            if value is not copy or hook.records:
                value, copy = copy_for_hook(value, hook.records), None
            if not hook.records:
                copy = value
            value = hook(value, self)
        gradient_hooks = [hook for hook in hooks if hook.dir == "bwd"]
        if gradient_hooks and torch.is_grad_enabled() and can_have_gradient(value):
            value = self._on_gradient(value, gradient_hooks)
        return value

    def _on_gradient(self, value: Tensor, hooks: list[Hook]) -> Tensor:
        """A view of the value with hooks on its gradient; starts a graph if there is none."""
        value = value.view_as(value) if value.requires_grad else value.detach().requires_grad_().clone()

        def run(gradient: Tensor) -> Tensor:
            for hook in hooks:
                new = hook(gradient.clone(), self)  # autograd may use the same memory elsewhere, and accumulate into it
                gradient = gradient if hook.records else new
            return gradient

        value.register_hook(run)
        return value

    # ---- adding and removing -------------------------------------------------------------------------------

    def add_hook(
        self,
        hook: HookFunction,
        dir: str | None = None,
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: list[str] | None = None,
    ) -> Hook:
        """Adds a hook for all threads, until it is removed; `dir` is "fwd" (the default), "bwd" or "both".

        The `direction` and `when` of a hook object apply. With `alias_names` the function runs once for each of these names,
        as `hook.name`. Returns the handle. Raises ValueError for an unknown direction or one that contradicts the object's,
        TypeError for something that cannot be called with a value and a point.
        """
        direction, when = direction_and_when(hook, dir)
        options = (is_permanent, level, prepend, alias_names, when)
        handles = [self.make_hook(hook, each, *options) for each in directions_of(direction)]
        install_all([(self, handle) for handle in handles])
        return handles[0]

    def add_perma_hook(self, hook: HookFunction, dir: str | None = None) -> Hook:
        """Adds a hook that survives `reset_hooks`."""
        return self.add_hook(hook, dir, is_permanent=True)

    def make_hook(
        self,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: list[str] | None = None,
        when: str = "post",
    ) -> Hook:
        """A handle for this point that is not installed yet; raises TypeError if the function cannot be called as a hook."""
        return Hook(hook, self, dir, is_permanent, level, prepend, alias_names, when)

    def hooks_by_id(self) -> dict[int, Hook]:
        """All hooks at this point, of any thread or scope, in order, without those recorded for recomputations."""
        kept = [
            hook for owner, hooks in list(self._hooks.items()) if not isinstance(owner, CallRecord) for hook in hooks
        ]
        return {hook.id: hook for hook in sorted(kept, key=lambda hook: hook.order)}

    def holds(self, hook: Hook) -> bool:
        """Whether this handle was added by `add_hook` and has not been removed."""
        return hook in self._hooks.get(None, ())

    @scope.synchronized
    def install(self, hook: Hook, frame: Frame | None) -> None:
        """Installs a handle until a frame is closed, or until it is removed (None)."""
        self._hooks[frame] = (*self._hooks.get(frame, ()), hook)
        self._hooks_changed()

    def uninstall(self, owner: Owner) -> None:
        """Removes the hooks of a frame or of a checkpointed call."""
        self._hooks.pop(owner, None)
        self._hooks_changed()

    def _hooks_changed(self) -> None:
        """Called after hooks were installed or removed."""

    def end_level(self, level: int, thread_or_task: int) -> None:
        """Removes the hooks that a thread or task added with this `level`."""
        if None in self._hooks:
            ended = (level, thread_or_task)
            self._keep(lambda hook: hook.is_permanent or (hook.context_level, hook.thread_or_task) != ended, [None])

    def discard(self, hook: Hook) -> None:
        """Removes one hook; recomputations of earlier forward passes still run it."""
        self._keep(lambda h: h is not hook, [owner for owner in list(self._hooks) if not isinstance(owner, CallRecord)])

    def remove_hooks(self, dir: str = "both", including_permanent: bool = False, level: int | None = None) -> None:
        """Removes the hooks of this context, of one direction or level; permanent ones only if requested."""
        directions = directions_of(dir)
        if not self._hooks:
            return

        def stays(hook: Hook) -> bool:
            return (
                (hook.is_permanent and not including_permanent)
                or (level is not None and hook.context_level != level)
                or hook.dir not in directions
            )

        self._keep(stays, [None, *scope.current()])

    @scope.synchronized
    def _keep(self, stays: Callable[[Hook], bool], owners: Sequence[Owner]) -> None:
        for owner in owners:
            kept = tuple(hook for hook in self._hooks.get(owner, ()) if stays(hook))
            if kept:
                self._hooks[owner] = kept
            else:
                self._hooks.pop(owner, None)
        self._hooks_changed()

    def has_hooks(self, dir: str = "both", including_permanent: bool = True, level: int | None = None) -> bool:
        """Whether a hook of this direction (and level) is active in this context."""
        directions = directions_of(dir)
        return any(
            hook.dir in directions
            and (including_permanent or not hook.is_permanent)
            and level in (None, hook.context_level)
            for hook in self.active_hooks()
        )

    @property
    def fwd_hooks(self) -> list[Hook]:
        """The forward hooks that are active in this context."""
        return self.active_hooks("fwd")

    @property
    def bwd_hooks(self) -> list[Hook]:
        """The backward hooks that are active in this context."""
        return self.active_hooks("bwd")

    # ---- state and name ------------------------------------------------------------------------------------

    def clear_context(self) -> None:
        """Clears `ctx`, in which hooks store data."""
        self.ctx.clear()

    @property
    def step(self) -> int | None:
        """In generation, the number of tokens generated before this forward pass: 0 for the prompt, and after a prefix; in chunks
        minus the number of tokens of the prompt that come after it. None elsewhere."""
        return getattr(self.own_step or generation_step.current(), "step", None)

    @property
    def positions(self) -> Tensor | None:
        """In generation, the positions of the value's tokens in their rows: [pos], or [batch, pos] if the rows differ.

        Padding is not counted: 0 is the first real token of a row, and padding is -1. With a key/value cache a forward pass
        contains only new tokens, without it all of them. Also after a prefix and in chunks; None in other runs, at sites
        without a position axis, and at sites of a source whose length is fixed.
        """
        now = self.own_step or generation_step.current()
        has_positions = self.grows and (not self.dims or "pos" in self.dims or "query_pos" in self.dims)
        shown = slice(None) if self.columns is None else list(self.columns.shown)
        return now.positions[..., shown] if now is not None and has_positions else None

    @property
    def labels(self) -> Sequence[token_labels.Labels] | None:
        """What the tokens of each row are, if a conversation is read: by column, in generation by position in the row."""
        now = self.own_step or generation_step.current()
        return token_labels.current() if now is None else now.labels

    def layer(self) -> int:
        """The layer in the point's name: 3 for 'blocks.3.attn.hook_z'. Raises ValueError if there is none."""
        for part in filter(str.isdigit, (self.name or "").split(".")):
            return int(part)
        raise ValueError(f"hook point '{self.name}' is not in a layer: its name has no number")

    def under_name(self, name: str | None) -> "HookPoint":
        """This point under another name, with the same `ctx` and hooks."""
        alias = self.__class__.__new__(self.__class__)
        alias.__dict__.update(self.__dict__)
        alias.name = name
        alias.__dict__.setdefault("_original", self)
        return alias

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles: with the hooks of `add_hook`, without those of open scopes."""
        by_hand = self._hooks.get(None)
        return {**self.__dict__, "_hooks": {None: by_hand} if by_hand else {}}

    def repr_table(self) -> Table:
        """The name, the axes, and the hooks at this point."""
        shown = {"site": self.name, "axes": " ".join(self.dims), "in a cache": "on demand" if self.on_demand else ""}
        hooks = [("hook", f"{hook.dir}  {hook.function_name}") for hook in self.hooks_by_id().values()]
        return Table(("", "value"), [*((name, value) for name, value in shown.items() if value), *hooks])

    def extra_repr(self) -> str:
        directions = [hook.dir for hook in self.hooks_by_id().values()]
        counts = ", ".join(f"{directions.count(name)} {name}" for name in ("fwd", "bwd") if name in directions)
        parts = [
            repr(self.name) if self.name and _shows_name.get() else "",
            " ".join(self.dims),
            f"{counts} hook{'s' * (len(directions) > 1)}" if counts else "",
        ]
        return ", ".join(filter(None, parts))


def is_listening(*points: nn.Module) -> bool:
    """Whether anything listens at any of these points; a foreign module in place of a point counts as listening."""
    return any(not isinstance(point, HookPoint) or point.is_listening for point in points)


def hook_if_listening(point: nn.Module, x: Tensor) -> Tensor:
    """Passes a copy of `x` through a point if something listens there, so that edits in place do not reach `x`; else `x`."""
    return point(x.clone()) if is_listening(point) else x


def _do_nothing(*_: object) -> None:
    """A PyTorch hook without effect."""


@contextmanager
def unnamed() -> Iterator[None]:
    """Inside the block the repr of points omits their names, which the enclosing module prints."""
    token = _shows_name.set(False)
    try:
        yield
    finally:
        _shows_name.reset(token)


def install_all(plan: Sequence[tuple[HookPoint, Hook]]) -> None:
    """Installs handles without a scope: all, or none after an error. The handles of one point are removed together."""
    for point, handle in plan:
        handle.together = [other for there, other in plan if there is point]
    try:
        for point, handle in plan:
            point.install(handle, None)
    except BaseException:
        for point, handle in plan:
            point.discard(handle)
        raise


def directions_of(dir: str) -> tuple[str, ...]:
    if dir not in ("fwd", "bwd", "both"):
        raise ValueError(f"dir must be 'fwd', 'bwd' or 'both', got {dir!r}")
    return ("fwd", "bwd") if dir == "both" else (dir,)
