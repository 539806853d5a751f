"""Models whose blocks are on several devices, or have weights that rest elsewhere: hooks move what enters a block to its device.

Everything but the blocks is on one device, `model.device`, where tokens come in and logits come out. A model that computes on one
device has none of these hooks. Weights that rest elsewhere are `Offloaded`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.stack_context import EncodedSource
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.weights.offloaded import Offloaded

DeviceMap = dict[str, torch.device]  # the names of all blocks, and "" for the other parts of the model
Rest = Literal["cpu", "disk"]  # where weights are between runs


@dataclass(frozen=True)
class DevicePlan:
    """The device on which each block computes, and of some blocks where their weights rest."""

    devices: DeviceMap
    offloaded: dict[str, Rest] = field(default_factory=dict)

    def device_of(self, name: str) -> torch.device:
        """The device of a weight between runs."""
        return torch.device("cpu") if block_of(name) in self.offloaded else device_of(name, self.devices)

    def is_on_disk(self, name: str) -> bool:
        """Whether a weight is in a memory-mapped file."""
        return self.offloaded.get(block_of(name)) == "disk"


def block_of(name: str) -> str:
    """The name of the block of a weight or module, "blocks.3" of "blocks.3.attn.W_Q"."""
    return ".".join(name.split(".")[:2])


class MoveInputs:
    """A forward pre-hook that moves the tensors among the inputs of a module, and those of a `Context`, to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _moved((args, kwargs), self.device, set())


class MoveOutput:
    """A forward hook of the last block of a stack: moves the output, and the context of the run, to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> Any:
        return _moved((output, args[1:], kwargs), self.device, set())[0]


def enter(block: nn.Module, resid: Tensor, context: Context) -> Tensor:
    """The input of a block on its device, with the context, for a caller that runs parts of the block."""
    for hook in block._forward_pre_hooks.values():
        if isinstance(hook, MoveInputs):
            return hook(block, (resid, context), {})[0][0]
    return resid


def leave(block: nn.Module, resid: Tensor, context: Context) -> Tensor:
    """The output of parts of a block where its own output would be, with the context."""
    for hook in block._forward_hooks.values():
        if isinstance(hook, MoveOutput):
            return hook(block, (resid, context), {}, resid)
    return resid


def is_mover(hook: object) -> bool:
    """Whether a hook of a module only moves values between devices."""
    return isinstance(hook, (MoveInputs, MoveOutput))


def _moved(value: object, device: torch.device, seen: set[int]) -> Any:
    """The value with all tensors in it on the device; contexts and other mutable objects are changed in place."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type != "cpu")  # on the CPU it must have arrived
    if isinstance(value, tuple):
        parts = [_moved(part, device, seen) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        value[:] = [_moved(part, device, seen) for part in value]
    elif isinstance(value, dict):
        value.update({key: _moved(part, device, seen) for key, part in value.items()})
    elif isinstance(value, (Context, EncodedSource)) and id(value) not in seen:
        seen.add(id(value))
        for name, part in vars(value).items():
            if name == "device":
                value.device = device  # type: ignore[union-attr]
            elif name not in value.of_layers:
                vars(value)[name] = _moved(part, device, seen)
    return value


def together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on this device if they are on several or offloaded; else as they are."""
    several = len({tensor.device for tensor in tensors}) > 1 or any(isinstance(each, Offloaded) for each in tensors)
    return [tensor.to(device) for tensor in tensors] if several else list(tensors)


def device_of(name: str, device_map: DeviceMap) -> torch.device:
    """The device of a weight."""
    return device_map.get(block_of(name), device_map[""])


def place(model: HookedRootModule, plan: DevicePlan) -> None:
    """Moves weights to the devices of the plan where they are elsewhere, one at a time, and registers the hooks.

    A model that computes on one device needs no hooks.
    """
    device_map = plan.devices
    for path, module in model.named_modules():
        _move_weights(module, device_of(f"{path}.", device_map), block_of(path) in plan.offloaded)
    model.cfg.device = str(device_map[""])
    model.offloaded = dict(plan.offloaded) or None
    if len({*device_map.values()}) == 1:
        return
    main, blocks = device_map[""], set[nn.Module]()
    for stack in model.stacks:
        layers = stack.blocks_of(model)
        blocks.add(layers)
        for layer, block in enumerate(layers):
            block.register_forward_pre_hook(MoveInputs(device_map[f"{stack.blocks}.{layer}"]), with_kwargs=True)
        layers[-1].register_forward_hook(MoveOutput(main), with_kwargs=True)
    for module in model.children():
        if module not in blocks and not isinstance(module, HookPoint):
            module.register_forward_pre_hook(MoveInputs(main), with_kwargs=True)
    model.device_map = dict(device_map)


def _move_weights(module: nn.Module, device: torch.device, is_offloaded: bool) -> None:
    """Moves the parameters and buffers of one module. Modules that share their parameters share the dictionary of these."""
    for leaf, old in module._parameters.items():
        if old is None or old.device == device or isinstance(old, Offloaded):
            continue
        if is_offloaded:
            module._parameters[leaf] = Offloaded.of(old, device)  # type: ignore[assignment]
        else:
            module._parameters[leaf] = nn.Parameter(old.detach().to(device), requires_grad=old.requires_grad)
    for leaf, buffer in module._buffers.items():
        module._buffers[leaf] = None if buffer is None else buffer.to(device)


def check_stays(places: Collection[object], *args: object, **kwargs: object) -> None:
    """Raises ValueError if the arguments of `nn.Module.to` name a device, for a model whose weights are in several places."""
    if len({*places}) == 1:
        return
    if (device := torch._C._nn._parse_to(*args, **kwargs)[0]) is not None:  # type: ignore[call-overload]
        spread = ", ".join(sorted({*map(str, places)}))
        raise ValueError(
            f"the model is spread over {spread} (device_map) and cannot be moved to {device}: load it again, with another "
            "device or device_map. model.to(dtype) works"
        )
