"""Sites whose values are split over ranks: hooks run on the full tensor, or on this rank's part of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hooked_lm.components.experts.moe import ExpertPoint
from hooked_lm.hooks import Hook, HookPoint
from hooked_lm.hooks.values import takes_hook_keyword
from hooked_lm.parallel.ranks import Ranks

Made = TypeVar("Made", bound=nn.Module)
SPLIT_AXES = ("head", "kv_head", "d_mlp")

_all_local = ContextVar("all_local", default=False)
_in_split_module = ContextVar("in_split_module", default=False)


class LocalHook:
    """A hook function or object that runs on this rank's part of a value; see `local`."""

    local = True

    def __init__(self, hook: Callable[..., object]) -> None:
        self._hook, self._takes_keyword = hook, takes_hook_keyword(hook)

    def __call__(self, value: Tensor, hook: HookPoint) -> Any:
        return self._hook(value, hook=hook) if self._takes_keyword else self._hook(value, hook)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)


def local(hook: Any) -> Any:
    """A hook, or a pair (site, hook), that runs on this rank's part of the value instead of the full tensor.

    A hook object with an attribute `local = True` does so by itself. At the sites of an expert such a hook runs only on the
    rank that has the expert. At sites whose values are not split it makes no difference.

    >>> site, hook = local(("blocks.0.attn.hook_z", lambda z, hook: None))
    >>> hook.local
    True
    """
    if isinstance(hook, (tuple, list)) and len(hook) == 2:
        return hook[0], local(hook[1])
    return LocalHook(hook)


@contextmanager
def local_values() -> Iterator[None]:
    """Within the block all hooks run on this rank's parts of values, those of `run_with_cache` too."""
    token = _all_local.set(True)
    try:
        yield
    finally:
        _all_local.reset(token)


def is_local(hook: Hook) -> bool:
    """Whether a hook runs on this rank's part of a value."""
    return _all_local.get() or getattr(hook.user_hook, "local", None) is True


class ComputedPoint(HookPoint, ABC):
    """A site inside a split module: its hooks run outside of the module's computation, see `guard`."""

    def _run(self, value: Tensor) -> Tensor:
        token = _in_split_module.set(False)
        try:
            return self._run_outside(value)
        finally:
            _in_split_module.reset(token)

    @abstractmethod
    def _run_outside(self, value: Tensor) -> Tensor:
        """Runs the hooks."""


class ReplicatedPoint(ComputedPoint):
    """A site whose value every rank has."""

    def _run_outside(self, value: Tensor) -> Tensor:
        return HookPoint._run(self, value)


class SplitPoint(ComputedPoint):
    """A site whose value is split over ranks along `axis`.

    It may also be called with a full value, `n_full` long on that axis, such as the engine's value of another run.
    """

    axis: int
    ranks: Ranks
    n_full: int | None

    def __call__(self, value: Tensor) -> Tensor:
        if self._has_torch_hooks():
            raise RuntimeError(
                f"'{self.name}' is split over {self.ranks.size} ranks and has a hook of PyTorch, which would see a part of the "
                "value: add it with point.add_hook or model.hooks"
            )
        if value.shape[self.axis] == self.n_full:
            value = self.ranks.own_part(value, self.axis)
        return super().__call__(value)

    def _run_outside(self, value: Tensor) -> Tensor:
        hooks = self.active_hooks()
        for when in ("pre", "post"):
            value = self._run_by_kind(value, [hook for hook in hooks if hook.when == when])
        return value

    def _run_by_kind(self, value: Tensor, hooks: list[Hook]) -> Tensor:
        """Runs hooks in order. Those on the gradient follow those on the value; the last group to be run on the value is
        the first on its gradient."""
        backward = [list(some) for _, some in groupby([h for h in hooks if h.dir == "bwd"], is_local)]
        in_order = [h for h in hooks if h.dir == "fwd"] + [h for some in reversed(backward) for h in some]
        for parts_only, some in groupby(in_order, is_local):
            run = list(some)
            value = self._run_in_order(value, run) if parts_only else self._run_on_full(value, run)
        return value

    def _run_on_full(self, value: Tensor, hooks: list[Hook]) -> Tensor:
        """This rank's part of the full tensor after these hooks."""
        full = self._run_in_order(self.ranks.gather(value, self.axis), hooks)
        only_read = all(hook.records and hook.dir == "fwd" for hook in hooks)
        if only_read and not (full.requires_grad and torch.is_grad_enabled()):
            return value
        return self.ranks.own_part(full, self.axis)


class SplitExpertPoint(ReplicatedPoint, ExpertPoint):
    """A site of an expert; hooks on this rank's part run only on the rank that has the expert."""

    is_here: bool

    def _run_here(self, hooks: list[Hook]) -> list[Hook]:
        return hooks if self.is_here else [hook for hook in hooks if not is_local(hook)]

    @property
    def is_shown(self) -> bool:
        """Whether anything on any rank needs the full value."""
        return self._has_torch_hooks() or any(not is_local(hook) for hook in self.active_hooks())


def remade(module: nn.Module, kind: type[Made]) -> Made:
    """A module of another class, with the name, the weights, the submodules and the hooks of this one, whose place it takes.

    Both have the same hooks: a handle from before removes its hook from the new module.
    """
    made = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    return made


def split_point(point: HookPoint, ranks: Ranks, n_full: int | None = None) -> ComputedPoint:
    """The point of a split module for this one, whose value is split along its axis of heads or neurons, if it has one."""
    axes = [i for i, axis in enumerate(point.dims) if axis in SPLIT_AXES]
    if not axes:
        return replicated_point(point)
    split = remade(point, SplitPoint)
    split.axis, split.ranks, split.n_full = axes[0], ranks, n_full
    return split


def replicated_point(point: HookPoint) -> ReplicatedPoint:
    """The point of a split module for this one, whose value every rank has."""
    return remade(point, ReplicatedPoint)


def split_expert_point(point: ExpertPoint, is_here: bool) -> SplitExpertPoint:
    """The point of an expert that one rank has for this one; whether this is that rank."""
    split = remade(point, SplitExpertPoint)
    split.is_here = is_here
    if point in split.hooked_points:
        split.hooked_points.remove(point)
        split.hooked_points.add(split)
    return split


def replace_points(module: nn.Module, new: Callable[[HookPoint], HookPoint]) -> None:
    """Replaces each point below a module."""
    for parent in module.modules():
        for name, point in list(parent.named_children()):
            if isinstance(point, HookPoint):
                setattr(parent, name, new(point))
