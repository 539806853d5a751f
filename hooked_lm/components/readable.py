"""Which tensors have values that Python can read, and checks of values for which it does not wait."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def is_readable(x: Tensor) -> bool:
    """Whether the values of a tensor can be read: not in `torch.compile`, and not of one without values (meta, fake)."""
    return not (torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor))


def is_on_host(x: Tensor) -> bool:
    """Whether the values of a tensor can be read without waiting for a GPU."""
    return is_readable(x) and not x.is_cuda


def check(right: Tensor, message: str, detail: Callable[[], str] | None = None) -> None:
    """Raises ValueError if a truth is false, with a message, or the one that `detail` makes of the values.

    The host does not wait for a GPU: there the device stops the program with the message, soon after (`torch._assert_async`).
    Inside `torch.compile` nothing is checked, as that would break the graph.
    """
    if torch.compiler.is_compiling():
        return
    if not is_on_host(right):
        torch._assert_async(right, message)
    elif not right:
        raise ValueError(message if detail is None else detail())
