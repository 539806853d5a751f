"""Hook points at the inputs and outputs of modules that know nothing of hook points."""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from hooked_lm.hooks import checkpoint, scope
from hooked_lm.hooks.hook import Hook
from hooked_lm.hooks.point import HookPoint
from hooked_lm.hooks.scope import Frame, Owner
from hooked_lm.hooks.select import UnknownSite

Key = int | str
# The calls of each module so far, in a run that tells them apart by the names that their points have then.
calls_so_far: ContextVar[dict[HookPoint, int] | None] = ContextVar("calls_so_far", default=None)


class _Tap(partial[Any]):
    """What PyTorch calls for a point."""


class ModulePoint(HookPoint):
    """A point at what a module is given or gives, through a hook of PyTorch that is there while something listens.

    A module may be given, and give, more than a tensor. With no `path` the first tensor is shown: of a tuple, a list, a
    dict, a dataclass; of the inputs, the positional before those given by name. A path of keys leads to another one.
    """

    def __init__(self, module: nn.Module, is_input: bool, name: str, path: tuple[Key, ...]) -> None:
        super().__init__(on_demand=is_input or bool(path))
        self.name, self.path, self.is_input = name, path, is_input
        self._owner = (module,)  # in a tuple, as the point is no parent of the module

    @classmethod
    def at_input(cls, module: nn.Module, name: str, path: tuple[Key, ...] = ()) -> "ModulePoint":
        """A point at the inputs of a module; they grow in generation unless all points inside say that theirs do not."""
        point, inside = cls(module, True, name, path), [m for m in module.modules() if isinstance(m, HookPoint)]
        point.grows = not inside or any(m.grows for m in inside)
        return point

    @classmethod
    def at_output(cls, module: nn.Module, name: str, path: tuple[Key, ...] = ()) -> "ModulePoint":
        """A point at the output of a module."""
        return cls(module, False, name, path)

    def stands_on(self, module: nn.Module | None) -> bool:
        """Whether this is the module that the point belongs to."""
        return self._owner[0] is module

    def call(self) -> HookPoint:
        """This point for the call that comes now: under its own name the first in a run, then as name@1, name@2."""
        under_way, counted = checkpoint.under_way(), calls_so_far.get()
        seen = checkpoint.seen_in_forward(under_way)
        if seen is not None and self in seen.calls:
            index = seen.next_call(self)
        elif counted is not None:
            counted[self] = index = counted.get(self, -1) + 1
        else:
            return self
        for call in () if under_way is None else under_way.forward:
            checkpoint.seen_in(call).calls.setdefault(self, []).append(index)
        return self if index == 0 else self.known_as(f"{self.name}@{index}")

    def leave(self) -> None:
        """Remove all hooks, and with them PyTorch's, but those that a recomputation is to see."""
        self._keep(lambda hook: False, [owner for owner in list(self._hooks) if not isinstance(owner, checkpoint.Seen)])

    # ---- PyTorch's hook comes with the first of ours and goes with the last ------------------------------------------

    def install(self, hook: Hook, frame: Frame | None) -> None:
        super().install(hook, frame)
        self._follow()

    def uninstall(self, owner: Owner) -> None:
        super().uninstall(owner)
        self._follow()

    def _keep(self, stays: Callable[[Hook], bool], owners: Sequence[Owner]) -> None:
        super()._keep(stays, owners)
        self._follow()

    @scope.exclusive
    def _follow(self) -> None:
        module = self._owner[0]
        there = module._forward_pre_hooks if self.is_input else module._forward_hooks
        mine = [key for key, tap in there.items() if isinstance(tap, _Tap) and tap.args[0] is self]
        if self._hooks and not mine and self.is_input:
            module.register_forward_pre_hook(_Tap(_at_inputs, self), with_kwargs=True)
        elif self._hooks and not mine:
            module.register_forward_hook(_Tap(_at_output, self))
        for key in () if self._hooks else mine:
            there.pop(key, None)
            module._forward_pre_hooks_with_kwargs.pop(key, None)


# ---- what PyTorch calls ----------------------------------------------------------------------------------------------


def _at_output(point: ModulePoint, module: nn.Module, args: Any, output: Any) -> Any:
    return _passed(point, output) if point.is_listening else None


def _at_inputs(
    point: ModulePoint, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    if kwargs is None or not point.is_listening:  # PyTorch gives none to a hook that another thread just took away
        return None
    given: dict[Key, Any] = dict(enumerate(args))
    given.update(kwargs)
    passed = _passed(point, given, _parameter(module, point.path[0], given) if point.path else None)
    return tuple(passed[i] for i in range(len(args))), {name: passed[name] for name in kwargs}


def _parameter(module: nn.Module, key: Key, given: Mapping[Key, Any]) -> Key:
    """How an input was given that may go by its place or by its name."""
    if key not in given:
        names = list(inspect.signature(module.forward).parameters)
        other = names.index(key) if key in names else names[key] if isinstance(key, int) and key < len(names) else key
        return other if other in given else key
    return key


def _passed(point: ModulePoint, whole: Any, first: Key | None = None) -> Any:
    """The whole with what the point makes of its part; a copy, as the next module may work in place."""
    there = dict(tensors_of(whole))
    path = point.path if first is None else (first, *point.path[1:])
    if not path and () not in there:
        if not there:
            return whole
        path = next(iter(there))
    if path not in there:
        tensors = ", ".join(map(spelled, there)) or "none"
        raise UnknownSite(f"'{point.name}' is no tensor in this run; the tensors are {tensors}")
    value = point.call()(there[path])
    return replaced(whole, path, value.clone() if isinstance(value, Tensor) else value)


# ---- values made of tensors ------------------------------------------------------------------------------------------


def spelled(path: tuple[Key, ...]) -> str:
    """How a path is written after a name.

    >>> spelled((0, "keys"))
    '[0][keys]'
    """
    return "".join(f"[{key}]" for key in path)


def parsed(name: str) -> tuple[str, tuple[Key, ...]]:
    """A name apart from the path after it.

    >>> parsed("h.0.attn[1][keys]")
    ('h.0.attn', (1, 'keys'))
    """
    base, brackets, _ = re.fullmatch(r"(.*?)((\[[^\[\]]+\])*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    keys = re.findall(r"\[([^\[\]]+)\]", brackets)
    return base, tuple(int(key) if key.isdigit() else key for key in keys)


def tensors_of(value: Any, path: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], Tensor]]:
    """The tensors inside tuples, lists, dicts and dataclasses, each with the path to it, in order."""
    if isinstance(value, Tensor):
        yield path, value
    for key, part in _parts(value):
        yield from tensors_of(part, (*path, key))


def _parts(value: Any) -> list[tuple[Key, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(of.name, getattr(value, of.name)) for of in fields(value)]
    return []


def replaced(value: Any, path: tuple[Key, ...], new: Any) -> Any:
    """The value with a new part at the end of a path; the given one stays as it was."""
    if not path:
        return new
    key, *rest = path
    part = replaced(dict(_parts(value))[key], tuple(rest), new)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(part if name == key else old for name, old in _parts(value)))
    if isinstance(value, (tuple, list)):
        return type(value)(part if i == key else old for i, old in enumerate(value))
    twin = copy.copy(value)
    if isinstance(value, Mapping):
        twin[key] = part
    else:
        object.__setattr__(twin, str(key), part)
    return twin
