"""The memory that a pass may take, in the words of `max_memory`, and what a token takes."""

import re

import torch
from torch import nn

AUTO = 1 << 30


def memory_of(max_memory: int | str, device: torch.device, name: str = "max_memory") -> int:
    """The bytes of a user's `max_memory` (see `bytes_of`). "auto" is 1 GiB on a CPU, half of the free memory on a GPU."""
    if max_memory != "auto":
        return bytes_of(max_memory, name)
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else AUTO


def bytes_of(size: int | str, name: str = "max_memory") -> int:
    """The number of bytes of an int or a string such as "512MB" or "2 GiB"; ValueError for anything else.

    >>> bytes_of("512MB"), bytes_of("1.5 GiB"), bytes_of("2KB"), bytes_of(1000)
    (512000000, 1610612736, 2000, 1000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B\s*", size) if isinstance(size, str) else None
    if found is not None:
        number, prefix, is_binary = found.groups()
        size = int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(prefix.upper() or " "))
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        auto = "'auto', " if name == "max_memory" else ""
        raise ValueError(f"{name} must be {auto}a number of bytes or a size such as '512MB', got {size!r}")
    return size


def token_bytes(module: nn.Module) -> int:
    """Estimated bytes for one token in a module: the outputs of its matrix products, times two for other intermediates."""
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    widths = sum(max(p.shape[-2:]) for p in module.parameters() if p.ndim >= 2)
    return 2 * widths * torch.finfo(dtype).bits // 8
