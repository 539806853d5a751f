"""Weights in temporary memory-mapped files, for those that should not be in memory and are in no checkpoint as they are."""

import os
import tempfile

import torch
from torch import Tensor


def in_file(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy in a memory-mapped temporary file, with strides in the same order. The file has no name, and ends with the tensor.

    It is made in the folder of `tempfile.gettempdir()`, which the environment variable TMPDIR names. A change of the tensor is
    one of the file. Nothing of the size of the tensor is allocated.

    >>> import torch
    >>> from hooked_lm.weights.mapped import in_file
    >>> in_file(torch.tensor([0.5, 2.0]), torch.bfloat16)
    tensor([0.5000, 2.0000], dtype=torch.bfloat16)
    """
    like = torch.empty_like(tensor, device="meta", dtype=dtype)
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    descriptor, path = tempfile.mkstemp(prefix="hooked_lm-", suffix=".weight")
    os.close(descriptor)
    try:
        mapped = torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)
    finally:
        os.unlink(path)
    return mapped.as_strided(like.size(), like.stride()).copy_(tensor.detach())
