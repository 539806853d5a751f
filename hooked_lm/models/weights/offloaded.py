"""Weights that rest in main memory, or in a file, and that a model on another device copies there when it computes with them.

An `Offloaded` is an ordinary tensor on the CPU: it is read, edited, folded, saved and exported as any other. Only an operation
that combines it with tensors of a device gets a copy on that device, which is freed after the operation. So the device holds
one such weight at a time, and no code that uses weights needs to know about it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_leaves, tree_map

from hooked_lm.models.dry_run import dry_run_now

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
OF_GRAPHS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)  # their tensors are not operands
GIVE_PLAIN = get_default_nowrap_functions() | {Tensor.as_subclass}


class Offloaded(Tensor):
    """A tensor on the CPU that operations with tensors of another device copy there. Its views and functions are offloaded, too.

    Gradients accumulate in the tensor, on the CPU. Autograd saves the tensor, not its copy; the backward pass copies it again.
    """

    run_device: torch.device  # the device of the model, for tensors without values

    @classmethod
    def of(cls, weight: Tensor, run_device: torch.device) -> "Offloaded":
        """The same memory as an offloaded tensor, a parameter if the weight is one."""
        with torch._C.DisableTorchFunctionSubclass():
            made = (weight.detach() if isinstance(weight, nn.Parameter) else weight).as_subclass(cls)
            made.run_device = run_device
            if isinstance(weight, nn.Parameter):
                made.requires_grad_(weight.requires_grad)._is_param = True
            return made

    @classmethod
    def __torch_function__(
        cls, func: Function, types: tuple[type, ...], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_GRAPHS:
                return func(*args, **kwargs)
            # also where all arguments are weights
            if dry_run_now() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
                args, kwargs = tree_map(lambda x: _without_values(x) if isinstance(x, cls) else x, (args, kwargs))
                return func(*args, **kwargs)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            device = next((x.device for x in tensors if not isinstance(x, cls) and x.device.type != "cpu"), None)
            if device is not None:
                return _with_copies(func, args, kwargs, torch.device("cpu") if _writes(func, args, kwargs) else device)
            out = func(*args, **kwargs)
            if func in GIVE_PLAIN:
                return out
            run_device = next(x.run_device for x in tensors if isinstance(x, cls))
            return tree_map(lambda x: _offloaded(x, run_device) if isinstance(x, Tensor) else x, out)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offloaded":
        if id(self) not in memo:
            copy = _plain(self).detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = Offloaded.of(self._as_kind(copy), self.run_device)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickles as a plain tensor or parameter, which anyone can load."""
        return self._as_kind(_plain(self)).__reduce_ex__(protocol)

    def _as_kind(self, tensor: Tensor) -> Tensor:
        return nn.Parameter(tensor.detach(), self.requires_grad) if isinstance(self, nn.Parameter) else tensor


def _plain(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _offloaded(x: Tensor, run_device: torch.device) -> Tensor:
    """A result of offloaded tensors alone."""
    return Offloaded.of(x, run_device) if type(x) is Tensor and x.device.type == "cpu" else x


def _without_values(x: Offloaded) -> Tensor:
    """The copy of a weight on the device of the model, in a run on tensors without values."""
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.run_device)


def _writes(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Whether a function writes into an offloaded tensor, so that its other operands come to this one."""
    name = func.__name__
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
    written = kwargs.get("out", args[0] if in_place and args else None)
    return any(isinstance(x, Offloaded) for x in tree_leaves(written))


def _with_copies(func: Function, args: Args, kwargs: Kwargs, device: torch.device) -> Any:
    """The result of a function of copies on this device. Of these, autograd saves how to make them again."""
    if device.type == "cpu":  # it writes
        args, kwargs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, (args, kwargs))
        return func(*args, **kwargs)
    at_rest: dict[int, Tensor] = {}  # the storage of a copy -> its origin

    def copied(x: object) -> object:
        if not isinstance(x, Offloaded):
            return x
        copy = x.as_subclass(Tensor).to(device)
        if is_recorded:
            at_rest[copy.untyped_storage()._cdata] = x.detach().as_subclass(Tensor)
        return copy

    def pack(saved: Tensor) -> "Tensor | _Copy":
        origin = at_rest.get(saved.untyped_storage()._cdata)
        if origin is None:
            return saved
        return _Copy(origin, origin._version, saved.size(), saved.stride(), saved.storage_offset(), device)

    # transforms of torch.func have no hooks for what they save
    is_recorded = torch.is_grad_enabled() and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    args, kwargs = tree_map(copied, (args, kwargs))
    if not is_recorded:
        return func(*args, **kwargs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept() if isinstance(kept, _Copy) else kept):
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Copy:
    """How to make (a view of) the copy of a weight again, for a backward pass."""

    origin: Tensor
    version: int
    size: torch.Size
    strides: tuple[int, ...]
    offset: int | torch.SymInt
    device: torch.device

    def __call__(self) -> Tensor:
        if self.origin._version != self.version:
            raise RuntimeError(
                f"an offloaded weight of shape {tuple(self.origin.shape)} was changed in place after the forward pass, which the "
                "backward pass needs as it was; change weights after backward()"
            )
        return self.origin.to(self.device).as_strided(self.size, self.strides, self.offset)
