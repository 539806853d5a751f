"""Devices: what is free on them, which one to take, and moving a model there.

A model of this package lives on one device. What is about several is for configs and transformers models of others.
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
    "calculate_available_device_cuda_memory", "count_unique_devices",
    "determine_available_memory_for_available_devices", "find_embedding_device", "find_misplaced_modules",
    "get_best_available_cuda_device", "get_best_available_device", "get_device_for_block_index", "is_mixed_cpu_gpu",
    "move_to_and_update_config", "print_gpu_mem", "resolve_device_map", "sort_devices_based_on_available_memory",
    "warn_if_mps",
]  # fmt: skip

AvailableDeviceMemory = list[tuple[int, int]]  # the index of a device, and its free bytes
MaxMemory = dict[str | int, str | int]
DeviceMap = str | dict[str, str | int]
MIXED_CPU_GPU_ERROR = (
    "the device_map names both a CPU and GPUs: the weights on the CPU would be placeholders between runs"
)


@runtime_checkable
class ModelWithCfg(Protocol):
    """A module that has a config."""

    cfg: Any

    def state_dict(self) -> dict[str, Tensor]: ...

    def to(self, device_or_dtype: Any) -> Any: ...


Model = TypeVar("Model", bound=nn.Module)


# ---- memory --------------------------------------------------------------------------------------------------------


def print_gpu_mem(step_name: str = "") -> None:
    """Print how much memory tensors take on the current GPU, in GiB."""
    print(f"{step_name} ~ {torch.cuda.memory_allocated() / 2**30:.2f} GiB allocated on GPU.")


def calculate_available_device_cuda_memory(i: int) -> int:
    """The bytes of GPU `i` that no tensor of this process takes."""
    return torch.cuda.get_device_properties(i).total_memory - torch.cuda.memory_allocated(i)


def determine_available_memory_for_available_devices(max_devices: int) -> AvailableDeviceMemory:
    """What is free on the first GPUs."""
    return [(i, calculate_available_device_cuda_memory(i)) for i in range(max_devices)]


def sort_devices_based_on_available_memory(devices: AvailableDeviceMemory) -> AvailableDeviceMemory:
    """The device with the most free memory first; of equals, the one that was given first."""
    return sorted(devices, key=lambda device: device[1], reverse=True)


# ---- which device --------------------------------------------------------------------------------------------------


def get_best_available_cuda_device(max_devices: int | None = None) -> torch.device:
    """The GPU with the most free memory, of all or of the first so many; OSError if there is none."""
    n_devices = torch.cuda.device_count() if max_devices is None else max_devices
    if n_devices < 1:
        raise OSError("a CUDA device was asked for, and there is none")
    free = determine_available_memory_for_available_devices(n_devices)
    return torch.device("cuda", sort_devices_based_on_available_memory(free)[0][0])


def get_best_available_device(cfg: Any) -> torch.device:
    """The device of a config; if it asks for several GPUs, the one of them with the most free memory."""
    device = torch.device(cfg.device)
    several = device.type == "cuda" and cfg.n_devices > 1
    return get_best_available_cuda_device(cfg.n_devices) if several else device


def get_device_for_block_index(index: int, cfg: Any, device: torch.device | str | None = None) -> torch.device:
    """Where a layer is when a model's layers are spread evenly over `cfg.n_devices` GPUs, from `device` on.

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
    """`device_map` and `max_memory` for transformers' own `from_pretrained`, so that a model takes `n_devices` GPUs.

    A `device_map` that is given wins. Raises ValueError for one that offloads weights, for one beside a `device`, and for
    more GPUs than there are.
    """
    if device_map is not None:
        if device is not None:
            raise ValueError("give device or device_map, not both")
        places = list(device_map.values()) if isinstance(device_map, Mapping) else []
        if "disk" in places:
            raise ValueError(f"device_map puts weights on disk, where no hook can read them: {device_map}")
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
    """Whether a map of devices names both a CPU and a GPU; a GPU may be a number."""
    kinds = {"cuda" if isinstance(value, int) else str(value).lower().partition(":")[0] for value in values}
    return {"cpu", "cuda"} <= kinds


# ---- transformers models that are spread ---------------------------------------------------------------------------


def find_embedding_device(hf_model: Any) -> torch.device | None:
    """Where a transformers model that is spread over devices takes its tokens; None if it is not spread."""
    places = getattr(hf_model, "hf_device_map", None)
    if not places:
        return None
    embedding = hf_model.get_input_embeddings() if hasattr(hf_model, "get_input_embeddings") else None
    weight = None if embedding is None else next(embedding.parameters(), None)
    return torch.device(_place(next(iter(places.values())))) if weight is None else weight.device


def count_unique_devices(hf_model: Any) -> int:
    """Over how many devices a transformers model is spread; the disk counts as one."""
    return len(set(map(_place, (getattr(hf_model, "hf_device_map", None) or {"": "cpu"}).values())))


def find_misplaced_modules(hf_model: Any) -> list[tuple[str, str, str]]:
    """Name, device in the map and real device of the modules that are not where a spread model's map says."""
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
    """Move a module, or change its dtype, as `torch.nn.Module.to` does; `cfg.device` or `cfg.dtype` follows.

    A `to` that the module's class has of its own is not called: it may be the caller.
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


def warn_if_mps(device: str | torch.device) -> None:
    """Warn, once in a process, that Apple GPUs compute some things wrongly without saying so.

    With TRANSFORMERLENS_ALLOW_MPS=1 in the environment it is taken as known.
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
