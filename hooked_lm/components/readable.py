"""Which tensors have values that Python can read."""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def is_readable(x: Tensor) -> bool:
    """Whether the values of a tensor can be read: not in `torch.compile`, and not of one without values (meta, fake)."""
    return not (torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor))
