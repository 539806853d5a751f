"""Devices: free memory, choosing a device, moving a model.

A model of this package is on one device. Functions for several devices are for configs and transformers models.
"""

import os
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = [
    "MIXED_CPU_GPU_ERROR", "AvailableDeviceMemory", "MaxMemory", "ModelWithCfg",
    "calculate_available_device_cuda_memory", "cast_floating_params_to_dtype", "count_unique_devices",
    "determine_available_memory_for_available_devices", "find_embedding_device", "find_misplaced_modules",
    "get_best_available_cuda_device", "get_best_available_device", "get_device_for_block_index", "is_mixed_cpu_gpu",
    "maybe_cast_floating_params",
    "move_to_and_update_config", "print_gpu_mem", "resolve_device_map", "sort_devices_based_on_available_memory",
    "warn_if_mps",
]  # fmt: skip

AvailableDeviceMemory = list[tuple[int, int]]  # the index of a device, and its free memory in bytes
MaxMemory = dict[str | int, str | int]
DeviceMap = str | dict[str, str | int]
MIXED_CPU_GPU_ERROR = (
    "the device_map names both a CPU and GPUs: the weights on the CPU would be placeholders between runs"
)


@runtime_checkable
class ModelWithCfg(Protocol):
    """A module with a config."""

    cfg: Any

    def state_dict(self) -> dict[str, Tensor]: ...

    def to(self, device_or_dtype: Any) -> Any: ...


Model = TypeVar("Model", bound=nn.Module)


# ---- memory --------------------------------------------------------------------------------------------------------


def print_gpu_mem(step_name: str = "") -> None:
    """Prints the memory of tensors on the current GPU, in GiB."""
    print(f"{step_name} ~ {torch.cuda.memory_allocated() / 2**30:.2f} GiB allocated on GPU.")


def calculate_available_device_cuda_memory(i: int) -> int:
    """The memory of GPU `i` in bytes that tensors of this process do not use."""
    return torch.cuda.get_device_properties(i).total_memory - torch.cuda.memory_allocated(i)


def determine_available_memory_for_available_devices(max_devices: int) -> AvailableDeviceMemory:
    """The free memory of the first GPUs."""
    return [(i, calculate_available_device_cuda_memory(i)) for i in range(max_devices)]


def sort_devices_based_on_available_memory(devices: AvailableDeviceMemory) -> AvailableDeviceMemory:
    """The devices by free memory, the largest first; equal ones keep their order."""
    return sorted(devices, key=lambda device: device[1], reverse=True)


# ---- which device --------------------------------------------------------------------------------------------------


def get_best_available_cuda_device(max_devices: int | None = None) -> torch.device:
    """The GPU with the most free memory, of all or of the first `max_devices`; raises OSError if there is none."""
    n_devices = torch.cuda.device_count() if max_devices is None else max_devices
    if n_devices < 1:
        raise OSError("there is no CUDA device")
    free = determine_available_memory_for_available_devices(n_devices)
    return torch.device("cuda", sort_devices_based_on_available_memory(free)[0][0])


def get_best_available_device(cfg: Any) -> torch.device:
    """The device of a config; of several GPUs, the one with the most free memory."""
    device = torch.device(cfg.device)
    several = device.type == "cuda" and cfg.n_devices > 1
    return get_best_available_cuda_device(cfg.n_devices) if several else device


def get_device_for_block_index(index: int, cfg: Any, device: torch.device | str | None = None) -> torch.device:
    """The device of a layer if layers are distributed evenly over `cfg.n_devices` GPUs, starting with `device`.

    >>> from types import SimpleNamespace
    >>> cfg = SimpleNamespace(device="cuda", n_devices=2, n_layers=5)
    >>> [get_device_for_block_index(layer, cfg).index for layer in range(5)]
    [0, 0, 0, 1, 1]
    """
    first = torch.device(cfg.device if device is None else device)
    if first.type == "cpu":
        return first
    return torch.device(first.type, (first.index or 0) + index * cfg.n_devices // cfg.n_layers)


def resolve_device_map(
    n_devices: int | None,
    device_map: DeviceMap | None,
    device: str | torch.device | None,
    max_memory: MaxMemory | None = None,
) -> tuple[DeviceMap | None, MaxMemory | None]:
    """The `device_map` and `max_memory` for transformers' `from_pretrained` that use `n_devices` GPUs.

    A given `device_map` takes precedence. Raises ValueError if it offloads weights, if `device` is given too, and if there are
    fewer GPUs.
    """
    if device_map is not None:
        if device is not None:
            raise ValueError("pass device or device_map, not both")
        places = list(device_map.values()) if isinstance(device_map, Mapping) else []
        if "disk" in places:
            raise ValueError(f"device_map offloads weights to disk, where hooks cannot read them: {device_map}")
        if is_mixed_cpu_gpu(places):
            raise ValueError(MIXED_CPU_GPU_ERROR)
        return device_map, max_memory
    if n_devices is None or n_devices <= 1:
        return None, max_memory
    if (present := torch.cuda.device_count()) < n_devices:
        raise ValueError(f"n_devices={n_devices}, and there are {present} CUDA devices")
    free: MaxMemory = {i: torch.cuda.mem_get_info(i)[0] for i in range(n_devices)}
    return "balanced", free if max_memory is None else max_memory


def is_mixed_cpu_gpu(values: Iterable[Any]) -> bool:
    """Whether a device map contains both a CPU and a GPU; a GPU may be an int."""
    kinds = {"cuda" if isinstance(value, int) else str(value).lower().partition(":")[0] for value in values}
    return {"cpu", "cuda"} <= kinds


# ---- transformers models that are spread ---------------------------------------------------------------------------


def find_embedding_device(hf_model: Any) -> torch.device | None:
    """The device of the token embedding of a distributed transformers model; None for other models."""
    places = getattr(hf_model, "hf_device_map", None)
    if not places:
        return None
    embedding = hf_model.get_input_embeddings() if hasattr(hf_model, "get_input_embeddings") else None
    weight = None if embedding is None else next(embedding.parameters(), None)
    return torch.device(_place(next(iter(places.values())))) if weight is None else weight.device


def count_unique_devices(hf_model: Any) -> int:
    """The number of devices of a transformers model; the disk counts as one."""
    return len(set(map(_place, (getattr(hf_model, "hf_device_map", None) or {"": "cpu"}).values())))


def find_misplaced_modules(hf_model: Any) -> list[tuple[str, str, str]]:
    """The name, the device in the device map, and the actual device of modules for which these differ."""
    found = []
    for name, place in (getattr(hf_model, "hf_device_map", None) or {}).items():
        if name and name not in dict(hf_model.named_modules()):
            continue
        weight = next(hf_model.get_submodule(name).parameters(), None)
        expected = _place(place)
        if weight is not None and not weight.is_meta and expected not in (str(weight.device), weight.device.type):
            found.append((name, expected, str(weight.device)))
    return found


def _place(place: Any) -> str:
    return f"cuda:{place}" if isinstance(place, int) else str(place)


# ---- moving --------------------------------------------------------------------------------------------------------


def move_to_and_update_config(
    model: Model, device_or_dtype: torch.device | str | torch.dtype, print_details: bool = True
) -> Model:
    """Moves a module, or changes its dtype, like `torch.nn.Module.to`, and updates `cfg.device` or `cfg.dtype`.

    An overridden `to` of the module is not called, because it may be the caller.
    """
    what = "dtype" if isinstance(device_or_dtype, torch.dtype) else "device"
    value = device_or_dtype if what == "dtype" else str(device_or_dtype)
    if what == "device":
        warn_if_mps(str(value))
    nn.Module.to(model, device_or_dtype)
    setattr(model.cfg, what, value)
    if print_details:
        print(f"{what} of the model: {value}")
    return model


def cast_floating_params_to_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point parameters of a module, in place.

    Those of one byte belong to a quantised weight and keep their dtype, as do those on the meta device, where offloaded
    weights are.

    >>> layer = nn.Linear(2, 2)
    >>> cast_floating_params_to_dtype(layer, torch.bfloat16)
    >>> layer.weight.dtype
    torch.bfloat16
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize > 1 and not parameter.is_meta:
            parameter.data = parameter.data.to(dtype)


def maybe_cast_floating_params(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point parameters of a transformers model, unless its config says that it is quantised."""
    config = getattr(model, "config", None)
    settings = (
        config.get("quantization_config")
        if isinstance(config, Mapping)
        else getattr(config, "quantization_config", None)
    )
    if settings is None:
        cast_floating_params_to_dtype(model, dtype)


def warn_if_mps(device: str | torch.device) -> None:
    """Warns, once in a process, that some results on Apple GPUs are silently wrong.

    TRANSFORMERLENS_ALLOW_MPS=1 in the environment disables the warning.
    """
    if torch.device(device).type == "mps" and os.environ.get("TRANSFORMERLENS_ALLOW_MPS") != "1":
        _warn_of_mps()


@cache
def _warn_of_mps() -> None:
    warnings.warn(
        f"torch {torch.__version__} may give wrong numbers on an Apple GPU: compare with a run on the CPU. "
        "TRANSFORMERLENS_ALLOW_MPS=1 in the environment silences this",
        stacklevel=3,
    )
