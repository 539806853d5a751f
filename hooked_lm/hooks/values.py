"""Copies of the values that hooks receive, and checks of the values that they return."""

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn


def spec_of(value: object) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    """The properties of a tensor that a hook must not change; None for other values."""
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None


def wrong_return(where: str, new: object, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Exception:
    expected = f"{tuple(shape)} {dtype} on {device}"
    if isinstance(new, Tensor):
        got = f"{tuple(new.shape)} {new.dtype} on {new.device}"
        return ValueError(f"{where} returned a tensor {got}; expected {expected}")
    return TypeError(
        f"{where} returned a {type(new).__name__}; expected None or a tensor {expected}. "
        "Return only the new value, or None to keep the value."
    )


def copy_for_hook(value: object, is_read_only: bool) -> Any:
    """A copy of the value, so that an in-place edit affects only the rest of the run.

    It does not affect the caller's input, entries of a cache, or tensors saved by autograd. A recorder does not edit and
    receives the value itself, unless the value's memory outlives the run.
    """
    if isinstance(value, Tensor) and (not is_read_only or _is_weight(value)):
        return value.clone()
    return value


def _is_weight(value: Tensor) -> bool:
    """Whether the value's memory outlives the run: a weight, an optimised input, or a view of one."""
    owner = value if value._base is None else value._base
    return isinstance(owner, nn.Parameter) or (owner.is_leaf and owner.requires_grad)


def can_have_gradient(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def takes_hook_keyword(function: Callable[..., object]) -> bool:
    """Whether the point is passed as `hook=` (to a parameter of that name or **kwargs) instead of by position."""
    if not callable(function):
        raise TypeError(
            f"a hook must be a function of (value, hook), got {function!r} of type {type(function).__name__}"
        )
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a builtin without a signature: use the documented call
        return True
    by_name = "hook" in signature.parameters
    for keyword in (by_name, not by_name):
        try:
            signature.bind(None, hook=None) if keyword else signature.bind(None, None)
        except TypeError:
            continue
        return keyword
    name = getattr(function, "__name__", repr(function))
    raise TypeError(f"a hook is called with (value, hook); {name} takes {signature}")


def backward_from(output: object) -> None:
    """Runs the backward pass of a scalar; raises ValueError for anything else."""
    if not isinstance(output, Tensor) or output.numel() != 1:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"incl_bwd needs a scalar output to differentiate, got {got}; give return_type='loss' "
            "if the model has a loss, or wrap a module that returns one"
        )
    if not output.requires_grad:
        raise ValueError("incl_bwd needs gradients, but the output has none: is torch.no_grad() active?")
    output.backward()
