"""Tensors that depend on a config only, such as the frequencies of rotary embeddings: copied to a device once, not in each
run."""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

T = TypeVar("T")


def constant(like: Tensor, make: Callable[..., T], *key: Hashable) -> T:
    """What `make(*key)` returns, its tensors on the device of another tensor.

    They are made on the host, so that every device has the same numbers, and kept for later runs; nobody may change them. `make`
    is kept too, so it must not belong to a model. `torch.compile` computes them in its graph; a graph of `torch.export` holds
    them, as CUDA graphs cannot copy from the host.
    """
    if torch.compiler.is_dynamo_compiling():
        return _moved(make(*key), like.device)
    if torch.compiler.is_compiling():
        with _disable_current_modes():  # those that trace, and give tensors without values
            return _kept(make, key, like.device, torch.get_default_dtype(), None)
    return _kept(make, key, like.device, torch.get_default_dtype(), getattr(like, "fake_mode", None))


def numbers(values: int | float | tuple[int | float, ...], dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of these numbers, as something to be made."""
    return torch.tensor(values, dtype=dtype)


@lru_cache(maxsize=256)
def _kept(
    make: Callable[..., T], key: tuple[Hashable, ...], device: torch.device, dtype: torch.dtype, mode: object
) -> T:
    with torch.inference_mode(False):
        return _moved(make(*key), device)


def _moved(made: T, device: torch.device) -> T:
    return tree_map_only(Tensor, lambda x: x.to(device), made)
