"""HookPoint: an identity module with a name, where hooks read, replace and differentiate what passes.

A point that nothing listens to costs one check. The hooks of a point are kept by the frame that put them there
(see scope.py); the hooks of `add_hook` belong to the module itself and are seen by everybody.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm.hooks import checkpoint, generation_step, scope
from hooked_lm.hooks.checkpoint import Calls, Seen
from hooked_lm.hooks.hook import Hook, HookFunction
from hooked_lm.hooks.hook_spec import add_options
from hooked_lm.hooks.scope import Frame, Owner
from hooked_lm.hooks.values import can_have_gradient, shown_to

_says_name = ContextVar("says_name", default=True)


class HookPoint(nn.Identity):
    """A named site inside a network: it returns what it is given, unless a hook says otherwise.

    A hook is called `fn(value, hook=point)` with a copy, which the next function is shown too. It returns None (then the
    copy goes on, edits in place included) or a replacement of the same shape, dtype and device. A backward hook is given
    the gradient of the final scalar with respect to the value instead, and may answer with a tuple of one.

    Args:
        dims: the names of the value's axes, in order, e.g. `("batch", "pos", "d_model")`; may be empty.
        on_demand: whether a cache of everything leaves this site out, because it would multiply memory.

    >>> import torch
    >>> point = HookPoint("batch", "d_model")
    >>> handle = point.add_hook(lambda value, hook: 2 * value)
    >>> point(torch.ones(1, 3))
    tensor([[2., 2., 2.]])
    """

    grows = True  # whether generation lengthens what passes here; the source of an encoder-decoder stays as it is

    def __init__(self, *dims: str, on_demand: bool = False) -> None:
        super().__init__()
        self.name: str | None = None
        self.dims = dims
        self.on_demand = on_demand
        self.ctx: dict[Any, Any] = {}
        # Frame -> its hooks; None -> those added by hand; Seen -> those for a recomputation. Readers take no lock: hence tuples.
        self._hooks: dict[Owner, tuple[Hook, ...]] = {}

    def __call__(self, value: Any) -> Any:
        """As for any module; but where PyTorch's own hooks have no part in it, past its costly machinery."""
        if self._hooks and self._has_own_forward():
            return self._run_behind_own_forward(value)
        return super().__call__(value) if self._has_torch_hooks() else self.forward(value)

    def forward(self, value: Any) -> Any:
        if not self._hooks or self._has_own_forward():
            return value
        return self._run(value)

    def _has_own_forward(self) -> bool:
        """Whether a subclass, or somebody who changed this instance, does something to the value on its way."""
        return type(self).forward is not HookPoint.forward or "forward" in self.__dict__

    # ---- running -------------------------------------------------------------------------------------------

    def active_hooks(self, dir: str | None = None) -> list[Hook]:
        """The hooks that would run here and now, in order, of one direction or of both."""
        if not self._hooks:
            return []
        calls = checkpoint.under_way()
        owners = scope.visible(calls)
        hooks = [hook for owner in owners for hook in self._hooks.get(owner, ())]
        if calls is not None:
            self._account_for(calls, owners)
        if len(self._hooks) > len(owners) or any(owner not in owners for owner in list(self._hooks)):
            scope.tell_of_pool(self.name, [owner for owner in list(self._hooks) if owner not in owners])
        if len(hooks) > 1:
            hooks.sort(key=lambda hook: hook.order)
        return hooks if dir is None else [hook for hook in hooks if hook.dir == dir]

    def _account_for(self, calls: Calls, owners: Sequence[Owner]) -> None:
        """Keep for the recomputation of checkpointed calls what their forward pass sees here, if it always sees the same."""
        point = self.__dict__.get("_known_as_of", self)
        seen = checkpoint.seen_in_forward(calls)
        if seen is not None and point in seen.changed:
            raise RuntimeError(
                f"the hooks at '{self.name}' changed between two calls inside one activation checkpoint, so its recomputation "
                "cannot know which of them it repeats: add and remove hooks outside of the checkpointed function"
            )
        for call in calls.forward:
            outer = [owner for owner in owners if not (isinstance(owner, Frame) and owner.is_inside(call))]
            hooks = tuple(hook for owner in outer for hook in self._hooks.get(owner, ()))
            self._keep_for(call, point, hooks)

    @scope.exclusive
    def _keep_for(self, call: object, point: "HookPoint", hooks: tuple[Hook, ...]) -> None:
        seen = checkpoint.seen_in(call)
        seen.points[point] = None
        if self._hooks.setdefault(seen, hooks) != hooks:
            seen.changed.add(point)

    @property
    def is_listening(self) -> bool:
        """Whether anything, here and now, would see the value: expensive sites are computed only then."""
        return self._has_torch_hooks() or bool(self._hooks and self.active_hooks())

    @property
    def is_edited(self) -> bool:
        """Whether anything but a recorder of the value listens here and now: what may change it, or sees its gradient."""
        return self._has_torch_hooks() or any(hook.dir == "bwd" or not hook.records for hook in self.active_hooks())

    def _has_torch_hooks(self) -> bool:
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks)

    def _run(self, value: Any) -> Any:
        hooks = self.active_hooks()
        if early := [hook for hook in hooks if hook.when == "pre"]:
            value = self._through(value, early)
            hooks = [hook for hook in hooks if hook.when != "pre"]
        return self._through(value, hooks)

    def _run_behind_own_forward(self, value: Any) -> Any:
        """Show hooks what a `forward` of its own makes of a value; that it asks PyTorch's list whether there are any, it may."""
        if not self.active_hooks():
            return super().__call__(value)
        mark: Any = object()  # no number, and so no other's
        try:
            try:
                self._forward_hooks[mark] = _nothing
                value = super().__call__(value)
            finally:
                self._forward_hooks.pop(mark, None)
        finally:  # an interrupt may come before the line above
            self._forward_hooks.pop(mark, None)
        return self._run(value)

    def _through(self, value: Any, hooks: list[Hook]) -> Any:
        """What hooks make of a value, in order; those on the gradient see that of what the others leave.

        Functions one after the other see the same tensor: what one of them kept is then part of the graph of the others.
        """
        copy = None  # that functions may edit, until one of them answers with a tensor of its own
        for hook in hooks:
            if hook.dir != "fwd":
                continue
            if value is not copy or hook.records:
                value, copy = shown_to(value, hook.records), None
            if not hook.records:
                copy = value
            value = hook(value, self)
        gradient_hooks = [hook for hook in hooks if hook.dir == "bwd"]
        if gradient_hooks and torch.is_grad_enabled() and can_have_gradient(value):
            value = self._on_gradient(value, gradient_hooks)
        return value

    def _on_gradient(self, value: Tensor, hooks: list[Hook]) -> Tensor:
        """The value as a node of its own, with the hooks on its gradient; starts a graph if none is there."""
        value = value.view_as(value) if value.requires_grad else value.detach().requires_grad_().clone()

        def run(gradient: Tensor) -> Tensor:
            for hook in hooks:
                shown = hook(gradient.clone(), self)  # autograd may use the same memory in other places,
                gradient = gradient if hook.records else shown  # and go on adding to what it is given
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
        """Add a hook that everybody sees until it is removed; `dir` is "fwd" (the default), "bwd" or "both".

        The `direction` and `when` of a hook object hold here too. With `alias_names` the function runs once for each of these
        names, seeing it as `hook.name`. Returns the handle. Raises ValueError for another direction, or one that contradicts
        the object's, TypeError for something that cannot be called with a value and a point.
        """
        direction, when = add_options(hook, dir)
        options = (is_permanent, level, prepend, alias_names, when)
        handles = [self.make_hook(hook, each, *options) for each in directions_of(direction)]
        install_all([(self, handle) for handle in handles])
        return handles[0]

    def add_perma_hook(self, hook: HookFunction, dir: str | None = None) -> Hook:
        """Add a hook that survives `reset_hooks`."""
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
        """A handle for this point, not active yet; raises if the function cannot be called as a hook."""
        return Hook(hook, self, dir, is_permanent, level, prepend, alias_names, when)

    def hooks_by_id(self) -> dict[int, Hook]:
        """All hooks at this point, of whatever thread or scope, in order, but those that only a recomputation sees."""
        kept = [hook for owner, hooks in list(self._hooks.items()) if not isinstance(owner, Seen) for hook in hooks]
        return {hook.id: hook for hook in sorted(kept, key=lambda hook: hook.order)}

    def holds(self, hook: Hook) -> bool:
        """Whether this handle is active here for good: added by hand and not removed since."""
        return hook in self._hooks.get(None, ())

    @scope.exclusive
    def install(self, hook: Hook, frame: Frame | None) -> None:
        """Activate a handle for the length of a frame, or for good (None)."""
        self._hooks[frame] = (*self._hooks.get(frame, ()), hook)

    def uninstall(self, owner: Owner) -> None:
        """Remove whatever a frame put here, or was kept here for a recomputation."""
        self._hooks.pop(owner, None)

    def end_level(self, level: int, runner: int) -> None:
        """Remove the hooks that a thread or task added by hand until the end of its scope of this depth."""
        if None in self._hooks:
            self._keep(lambda hook: hook.is_permanent or (hook.context_level, hook.runner) != (level, runner), [None])

    def discard(self, hook: Hook) -> None:
        """Remove one hook; a recomputation sees what its forward pass saw all the same."""
        self._keep(lambda h: h is not hook, [owner for owner in list(self._hooks) if not isinstance(owner, Seen)])

    def remove_hooks(self, dir: str = "both", including_permanent: bool = False, level: int | None = None) -> None:
        """Remove the hooks seen from here: of one direction, of one level, permanent ones only when asked."""
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

    @scope.exclusive
    def _keep(self, stays: Callable[[Hook], bool], owners: Sequence[Owner]) -> None:
        for owner in owners:
            kept = tuple(hook for hook in self._hooks.get(owner, ()) if stays(hook))
            if kept:
                self._hooks[owner] = kept
            else:
                self._hooks.pop(owner, None)

    def has_hooks(self, dir: str = "both", including_permanent: bool = True, level: int | None = None) -> bool:
        """Whether a hook of that direction (and level) is active here."""
        directions = directions_of(dir)
        return any(
            hook.dir in directions
            and (including_permanent or not hook.is_permanent)
            and level in (None, hook.context_level)
            for hook in self.active_hooks()
        )

    @property
    def fwd_hooks(self) -> list[Hook]:
        """The forward hooks active here and now."""
        return self.active_hooks("fwd")

    @property
    def bwd_hooks(self) -> list[Hook]:
        """The backward hooks active here and now."""
        return self.active_hooks("bwd")

    # ---- state and name ------------------------------------------------------------------------------------

    def clear_context(self) -> None:
        """Forget what hooks stored in `ctx`."""
        self.ctx.clear()

    @property
    def step(self) -> int | None:
        """In generation, how many new tokens there were before this pass: 0 while the prompt is read. None elsewhere."""
        now = generation_step.current()
        return None if now is None else now.step

    @property
    def positions(self) -> Tensor | None:
        """In generation, where in their rows the shown values stand: [pos], or [batch, pos] if the rows differ.

        Padding does not count: 0 is a row's first real token, whatever stands left of it, and padding itself is -1. With
        the key/value cache a pass shows new tokens only, and without it all of them again; the positions say so. None
        outside of generation, where the value's own axis counts the tokens, at sites that have no axis of positions, and
        at those of a source that does not grow.
        """
        now = generation_step.current()
        has_positions = self.grows and (not self.dims or "pos" in self.dims or "query_pos" in self.dims)
        return now.positions if now is not None and has_positions else None

    def layer(self) -> int:
        """The layer in the point's name: 3 for 'blocks.3.attn.hook_z'. ValueError where there is none."""
        for part in (self.name or "").split("."):
            if part.isdigit():
                return int(part)
        raise ValueError(f"hook point '{self.name}' stands in no layer: its name has no number")

    def known_as(self, name: str) -> "HookPoint":
        """This point under another name; `ctx` and hooks are the same."""
        alias = self.__class__.__new__(self.__class__)
        alias.__dict__.update(self.__dict__)
        alias.name = name
        alias.__dict__.setdefault("_known_as_of", self)
        return alias

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: hooks added by hand travel, those of open scopes belong to this context."""
        by_hand = self._hooks.get(None)
        return {**self.__dict__, "_hooks": {None: by_hand} if by_hand else {}}

    def extra_repr(self) -> str:
        n = len(self.hooks_by_id())
        parts = [
            repr(self.name) if self.name and _says_name.get() else "",
            " ".join(self.dims),
            f"{n} hook{'s' * (n > 1)}" if n else "",
        ]
        return ", ".join(filter(None, parts))


def is_listening(*points: nn.Module) -> bool:
    """Whether the value at any of these points is wanted; a foreign module in its place always listens."""
    return any(not isinstance(point, HookPoint) or point.is_listening for point in points)


def _nothing(*_: Any) -> None:
    """A hook of PyTorch's that only stands there."""


@contextmanager
def unnamed() -> Iterator[None]:
    """Points that are printed inside the block leave their names to the module that they are printed in."""
    token = _says_name.set(False)
    try:
        yield
    finally:
        _says_name.reset(token)


def install_all(plan: Sequence[tuple[HookPoint, Hook]]) -> None:
    """Activate handles for good: all of them or, when interrupted, none. Those of one point are removed together."""
    try:
        for point, handle in plan:
            handle.together = [other for there, other in plan if there is point]
            point.install(handle, None)
    except BaseException:
        for point, handle in plan:
            point.discard(handle)
        raise


def directions_of(dir: str) -> tuple[str, ...]:
    if dir not in ("fwd", "bwd", "both"):
        raise ValueError(f"dir must be 'fwd', 'bwd' or 'both', got {dir!r}")
    return ("fwd", "bwd") if dir == "both" else (dir,)
