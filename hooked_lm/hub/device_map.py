"""Which device each block of a model is on: a dict from users, or the plan of accelerate.

Blocks may be on several devices. Everything else (embeddings, final norm, unembedding, heads, towers) is on the model's device.
As in maps of accelerate, weights of blocks on "disk", and on "cpu" if the model's device is none, are offloaded: they rest there,
and the model's device computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from hooked_lm.keywords import nearest
from hooked_lm.models.base import BaseModel
from hooked_lm.models.placement import DevicePlan, Rest, block_of
from hooked_lm.models.shared_weights import shared_parts

Device = torch.device | str | int
MaxMemory = Mapping[int | str, int | str]
Placed = dict[str, torch.device | Literal["disk"]]  # a device of weights for each block, and for "", all else
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Placement:
    """A request to place a model on several devices: `device_map` is a strategy of accelerate, or module names -> devices."""

    device_map: str | Mapping[str, Device]
    max_memory: MaxMemory | None = None

    def plan(self, model: BaseModel) -> DevicePlan:
        """Where the blocks of a model and its other parts are. Raises ValueError for a map that cannot be honoured."""
        if not model.stacks:
            raise ValueError(f"device_map: a {type(model).__name__} lives on one device; name it with device=")
        found = self.device_map
        given = _inferred(model, found, self.max_memory) if isinstance(found, str) else _checked(model, found)
        placed = _by_block(model, given)
        for part, source in shared_parts(model):
            one, other = (placed.get(block_of(name)) for name in (part, source))
            if one != other:
                raise ValueError(
                    f"device_map: '{part}' shares its weights with '{source}', so both are on one device, not {one} and {other}"
                )
        return _as_plan(placed)


def default_device() -> torch.device:
    """The first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def placement(
    device: Device | None, device_map: object, max_memory: MaxMemory | None, n_devices: int, move_to_device: bool
) -> Placement | None:
    """The request that these arguments of `from_pretrained` make; None if they name one device or none."""
    if device_map == "disk":
        device_map = {"": "disk"}
    if isinstance(device_map, Mapping) and [*device_map] == [""] and device_map[""] != "disk":
        device_map = device_map[""]
    if n_devices != 1:
        if device_map is not None:
            raise ValueError(f"give n_devices={n_devices} or device_map, not both")
        if n_devices < 1:
            raise ValueError(f"n_devices must be at least 1, got {n_devices}")
        if n_devices > torch.cuda.device_count():
            raise ValueError(f"n_devices={n_devices}, and there are {torch.cuda.device_count()} CUDA devices")
        device_map = "balanced"
        max_memory = max_memory or {i: torch.cuda.mem_get_info(i)[0] for i in range(n_devices)}
    if not (isinstance(device_map, Mapping) or device_map in STRATEGIES):
        if max_memory is not None:
            raise ValueError(f"max_memory is for device_map='auto' and the like, not for device_map={device_map!r}")
        if device_map is not None:
            _check_map(device_map)
        return None
    if device is not None or not move_to_device:
        given = f"device={device!r}" if device is not None else "move_to_device=False"
        raise ValueError(f"device_map={device_map!r} says where the model goes; leave out {given}")
    if max_memory is not None and isinstance(device_map, Mapping):
        raise ValueError("max_memory is for device_map='auto' and the like, not for a dict")
    _check_map(device_map)
    return Placement(device_map, max_memory)


def _check_map(device_map: object) -> None:
    """Raises TypeError or ValueError for what is no device map, and for devices that torch does not have here."""
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return
    if not isinstance(device_map, (str, int, torch.device, Mapping)) or isinstance(device_map, bool):
        raise TypeError(
            f"device_map must be one of {', '.join(map(repr, STRATEGIES))}, a device, or a dict of devices by module, got "
            f"{device_map!r}"
        )
    if isinstance(device_map, Mapping):
        if not device_map:
            raise ValueError("device_map is an empty dict: name a device for '', which is everything, or leave it out")
        for name, device in device_map.items():
            _check_device(device, f"device_map[{name!r}]")
    elif _check_device(device_map, "device_map") == "meta":
        raise ValueError(f"device_map={device_map!r}: weights have no values there, and the model could not run")


def _check_device(device: object, where: str) -> str:
    """The type of a device. Raises ValueError for one that torch does not have here."""
    if device == "disk":
        return "disk"
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(cast(str, device))
    except (RuntimeError, TypeError):
        known = f"{', '.join(map(repr, STRATEGIES))}, 'disk'," if where == "device_map" else "'disk'"
        raise ValueError(f"{where}={device!r} is neither {known} nor a device such as 'cpu', 'cuda:1' or 1") from None
    n_cuda = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= n_cuda:
        there = "no CUDA device" if n_cuda == 0 else f"CUDA devices 0 to {n_cuda - 1} only"
        raise ValueError(f"{where}={device!r}, and torch finds {there} here")
    return found.type


def _block_names(model: BaseModel) -> list[str]:
    return [f"{stack.blocks}.{i}" for stack in model.stacks for i in range(len(stack.blocks_of(model)))]


def _checked(model: BaseModel, device_map: Mapping[str, Device]) -> dict[str, Device]:
    """A map of a user, whose names are all of modules."""
    modules = dict(model.named_modules())
    for name in device_map:
        if name not in modules:
            near = ", ".join(map(repr, nearest(name, modules)))
            raise ValueError(
                f"device_map: there is no module {name!r} in this {type(model).__name__}; names are those of hooked_lm"
                f"{near and f', the nearest are {near}'}"
            )
    return dict(device_map)


def _by_block(model: BaseModel, device_map: Mapping[str, Device]) -> Placed:
    """The place of each block and of the rest. Raises ValueError for parts without one, or on several."""
    blocks, containers = _block_names(model), {stack.blocks for stack in model.stacks}
    placed: Placed = {}
    for name in blocks:
        holder = next((of for of in (name, name.split(".")[0], "") if of in device_map), None)
        if holder is None:
            raise ValueError(f"device_map: '{name}' has no device")
        placed[name] = _place(device_map[holder])
    main = {name: _place(at) for name, at in device_map.items() if name not in {*blocks, *containers}}
    for name, at in list(main.items()):
        if (block := block_of(name)) in placed:
            if placed[block] != at:
                raise ValueError(f"device_map: '{name}' is a part of '{block}', and a block is on one device")
            del main[name]
    if len({*main.values()}) > 1:
        shown = ", ".join(f"{name or 'the rest'}: {at}" for name, at in main.items())
        raise ValueError(
            f"device_map: everything but the blocks is on one device, to which the stream returns after the last block ({shown})"
        )
    return {"": next(iter(main.values()), placed[blocks[0]]), **placed}


def _place(given: Device) -> torch.device | Literal["disk"]:
    if given == "disk":
        return "disk"
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


def _as_plan(placed: Placed) -> DevicePlan:
    """The model's device is that of the rest; if this is on disk, the first device of the blocks, a GPU if they have one."""
    devices = {name: at for name, at in placed.items() if isinstance(at, torch.device)}
    of_blocks = sorted(devices.values(), key=lambda at: at.type == "cpu")
    main = devices.get("") or next(iter(of_blocks), default_device())
    offloaded: dict[str, Rest] = {}
    for name in placed:
        if name and name not in devices:
            offloaded[name] = "disk"
        elif name and devices[name].type == "cpu" != main.type:
            offloaded[name] = "cpu"
    return DevicePlan({name: main if name in offloaded else devices.get(name, main) for name in placed}, offloaded)


class _Rest(nn.Module):
    """Everything but the blocks, which the planner must not divide."""


def _inferred(model: BaseModel, strategy: str, max_memory: MaxMemory | None) -> dict[str, Device]:
    """The plan of accelerate. Its module names are those of the blocks, and "rest"."""
    try:
        import accelerate
    except ImportError as error:
        raise ImportError(
            f"device_map={strategy!r} needs accelerate: pip install 'hooked-lm[accelerate]', or pass a dict of devices"
        ) from error
    if max_memory is None and not torch.cuda.is_available():
        return {"": "cpu"}
    whole, rest, stacks = nn.Module(), _Rest(), {stack.blocks for stack in model.stacks}
    for name, module in model.named_children():
        if name not in stacks:
            rest.add_module(name, module)
    whole.add_module("rest", rest)
    for stack in model.stacks:
        whole.add_module(stack.blocks, stack.blocks_of(model))
    kinds = sorted({type(block).__name__ for stack in model.stacks for block in stack.blocks_of(model)})
    memory: Any = None if max_memory is None else dict(max_memory)
    whole_kinds = ["_Rest", *kinds]
    if strategy != "sequential":
        low_zero = strategy == "balanced_low_0"
        memory = accelerate.utils.get_balanced_memory(whole, memory, whole_kinds, low_zero=low_zero)
    found: dict[str, Device] = accelerate.infer_auto_device_map(whole, memory, whole_kinds)
    if found.get("rest", found.get("")) == "disk":
        size = sum(p.numel() * p.element_size() for p in rest.parameters())
        amount = f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
        raise ValueError(
            f"device_map={strategy!r}: {amount} of embeddings and other weights beside the blocks, which cannot be "
            f"offloaded, do not fit into {max_memory}"
        )
    return {"embed" if name == "rest" else name: at for name, at in found.items()}
