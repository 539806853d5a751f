"""Typed lists of modules, and temporary values of parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["TypedModuleList", "temporarily_swap_parameter"]

T = TypeVar("T", bound=nn.Module)


class TypedModuleList(nn.ModuleList, Generic[T]):
    """A `torch.nn.ModuleList` whose annotation names the type of its modules: `TypedModuleList[nn.Linear]`."""


@contextmanager
def temporarily_swap_parameter(parameter: nn.Parameter, new_value: Tensor) -> Iterator[nn.Parameter]:
    """Inside the `with` block the parameter, still the same object, has other values; restores them afterwards.

    Raises TypeError unless the arguments are a parameter and a plain tensor, ValueError for another shape or dtype.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> with temporarily_swap_parameter(weight, torch.ones(2)):
    ...     print(weight.tolist())
    [1.0, 1.0]
    >>> weight.tolist()
    [0.0, 0.0]
    """
    if not isinstance(parameter, nn.Parameter) or isinstance(new_value, nn.Parameter):
        raise TypeError("expected a parameter and a plain tensor; pass new_value.detach()")
    for what in ("shape", "dtype"):
        if (has := getattr(parameter, what)) != (given := getattr(new_value, what)):
            raise ValueError(f"the parameter has {what} {has}, and the new values have {given}")
    before = parameter.detach().clone()
    try:
        with torch.no_grad():
            parameter.copy_(new_value)
        yield parameter
    finally:
        with torch.no_grad():
            parameter.copy_(before)
