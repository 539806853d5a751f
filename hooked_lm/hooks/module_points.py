"""Hook points at the inputs and outputs of arbitrary modules, by PyTorch's hooks."""

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from hooked_lm.hooks import checkpoint, scope
from hooked_lm.hooks.point import HookPoint
from hooked_lm.hooks.select import UnknownSite

Key = int | str
# The number of calls of each module in the current run of a wrapped module; None outside of such a run.
calls_so_far: ContextVar[dict[HookPoint, int] | None] = ContextVar("calls_so_far", default=None)


class _TorchHook(partial[Any]):
    """The PyTorch hook of a point; the type distinguishes it from hooks of users."""


class ModulePoint(HookPoint):
    """A point at the inputs or the output of a module; its PyTorch hook is registered while something listens.

    Inputs and outputs may contain several tensors, in tuples, lists, dicts and dataclasses. Without a `path` the point has the
    first one; positional inputs come before keyword inputs. A path of keys selects another tensor.
    """

    def __init__(self, module: nn.Module, is_input: bool, name: str, path: tuple[Key, ...]) -> None:
        super().__init__(on_demand=is_input or bool(path))
        self.name, self.path, self.is_input = name, path, is_input
        self._owner = (module,)  # in a tuple, so that the module is not registered as a submodule

    @classmethod
    def at_input(cls, module: nn.Module, name: str, path: tuple[Key, ...] = ()) -> "ModulePoint":
        """A point at the inputs of a module. `grows` is False if it is False for all points inside the module."""
        point, inside = cls(module, True, name, path), [m for m in module.modules() if isinstance(m, HookPoint)]
        point.grows = not inside or any(m.grows for m in inside)
        return point

    @classmethod
    def at_output(cls, module: nn.Module, name: str, path: tuple[Key, ...] = ()) -> "ModulePoint":
        """A point at the output of a module."""
        return cls(module, False, name, path)

    def belongs_to(self, module: nn.Module | None) -> bool:
        """Whether this is the point's module, or one that was made from it and has its hooks."""
        return module is not None and module._forward_pre_hooks is self._owner[0]._forward_pre_hooks

    def call(self) -> HookPoint:
        """This point, named by the number of the module's call in the run: `name`, then `name@1`, `name@2`."""
        calls, counted = checkpoint.active_calls(), calls_so_far.get()
        seen = checkpoint.record_to_replay(calls)
        if seen is not None and self in seen.calls:
            index = seen.next_call(self)
        elif counted is not None:
            counted[self] = index = counted.get(self, -1) + 1
        else:
            return self
        for call in () if calls is None else calls.forward:
            checkpoint.record_of(call).calls.setdefault(self, []).append(index)
        return self if index == 0 else self.under_name(f"{self.name}@{index}")

    def remove_all(self) -> None:
        """Removes all hooks except those recorded for a recomputation, and the PyTorch hook if none are left."""
        self._keep(
            lambda hook: False, [owner for owner in list(self._hooks) if not isinstance(owner, checkpoint.CallRecord)]
        )

    # ---- PyTorch's hook is registered with the first hook of the point and removed with the last --------------------

    @scope.synchronized
    def _hooks_changed(self) -> None:
        module = self._owner[0]
        there = module._forward_pre_hooks if self.is_input else module._forward_hooks
        mine = [key for key, tap in there.items() if isinstance(tap, _TorchHook) and tap.args[0] is self]
        if self._hooks and not mine and self.is_input:
            module.register_forward_pre_hook(_TorchHook(_at_inputs, self), with_kwargs=True)
        elif self._hooks and not mine:
            module.register_forward_hook(_TorchHook(_at_output, self))
        for key in () if self._hooks else mine:
            there.pop(key, None)
            module._forward_pre_hooks_with_kwargs.pop(key, None)


# ---- what PyTorch calls ----------------------------------------------------------------------------------------------


def _at_output(point: ModulePoint, module: nn.Module, args: object, output: object) -> Any:
    return _run_point(point, output) if point.is_listening else None


def _at_inputs(
    point: ModulePoint, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None
) -> Any:
    if kwargs is None or not point.is_listening:  # PyTorch omits kwargs if another thread just removed the hook
        return None
    given: dict[Key, object] = dict(enumerate(args))
    given.update(kwargs)
    passed = _run_point(point, given, _given_key(module, point.path[0], given) if point.path else None)
    return tuple(passed[i] for i in range(len(args))), {name: passed[name] for name in kwargs}


def _given_key(module: nn.Module, key: Key, given: Mapping[Key, object]) -> Key:
    """The key under which an input was passed: its position or its name."""
    if key not in given:
        names = list(inspect.signature(module.forward).parameters)
        other = names.index(key) if key in names else names[key] if isinstance(key, int) and key < len(names) else key
        return other if other in given else key
    return key


def _run_point(point: ModulePoint, whole: object, first: Key | None = None) -> Any:
    """The inputs or outputs with the point's new value; cloned, because the next module may work in place."""
    there = dict(tensors_of(whole))
    path = point.path if first is None else (first, *point.path[1:])
    if not path and () not in there:
        if not there:
            return whole
        path = next(iter(there))
    if path not in there:
        tensors = ", ".join(map(format_path, there)) or "none"
        raise UnknownSite(f"'{point.name}' is not a tensor in this run; the tensors are {tensors}")
    value = point.call()(there[path])
    return replaced(whole, path, value.clone() if isinstance(value, Tensor) else value)


# ---- nested values ---------------------------------------------------------------------------------------------------


def format_path(path: tuple[Key, ...]) -> str:
    """The text of a path, which follows the name of a module.

    >>> format_path((0, "keys"))
    '[0][keys]'
    """
    return "".join(f"[{key}]" for key in path)


def split_path(name: str) -> tuple[str, tuple[Key, ...]]:
    """Splits a name into the name of a module and a path.

    >>> split_path("h.0.attn[1][keys]")
    ('h.0.attn', (1, 'keys'))
    """
    base, brackets, _ = re.fullmatch(r"(.*?)((\[[^\[\]]+\])*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    keys = re.findall(r"\[([^\[\]]+)\]", brackets)
    return base, tuple(int(key) if key.isdigit() else key for key in keys)


def tensors_of(value: object, path: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], Tensor]]:
    """Yields the tensors inside tuples, lists, dicts and dataclasses, with their paths, in order."""
    if isinstance(value, Tensor):
        yield path, value
    for key, part in _parts(value):
        yield from tensors_of(part, (*path, key))


def _parts(value: object) -> list[tuple[Key, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(of.name, getattr(value, of.name)) for of in fields(value)]
    return []


def replaced(value: Any, path: tuple[Key, ...], new: object) -> Any:
    """A copy of the value with a new part at a path."""
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
