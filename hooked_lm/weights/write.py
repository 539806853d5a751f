"""Writes safetensors files one tensor at a time."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Planned:
    """A tensor that `make` makes, and the shape and dtype that it will have."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def write_safetensors(tensors: Mapping[str, Planned], path: Path) -> None:
    """Writes a new file with these tensors. Only one of them is in memory at a time.

    Raises:
        ValueError: safetensors files have no such dtype, or `make` returned another shape or dtype than announced.
        FileExistsError: the file exists.

    >>> import tempfile, torch
    >>> from hooked_lm.weights import open_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ones = Planned((2, 3), torch.float32, lambda: torch.ones(2, 3))
    ...     write_safetensors({"w": ones}, Path(folder, "model.safetensors"))
    ...     open_checkpoint(folder)["w"].sum().item()
    6.0
    """
    if unknown := {tensor.dtype for tensor in tensors.values()} - DTYPES.keys():
        raise ValueError(f"safetensors files cannot hold {', '.join(map(str, unknown))}")
    # the largest items first, so each tensor begins at a multiple of its item size
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        planned = tensors[name]
        begin, end = end, end + math.prod(planned.shape) * planned.dtype.itemsize
        entries[name] = {"dtype": DTYPES[planned.dtype], "shape": list(planned.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            file.write(_bytes(name, tensors[name]))


def _bytes(name: str, planned: Planned) -> memoryview:
    tensor = planned.make().detach()
    if tuple(tensor.shape) != planned.shape or tensor.dtype != planned.dtype:
        raise ValueError(
            f"{name!r}: expected {planned.dtype} {list(planned.shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
