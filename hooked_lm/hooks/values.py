"""What a hook is shown, and what it may return: checks and copies of single values."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def kind_of(value: Any) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    """What a hook must not change; of anything but a tensor, nothing is asked."""
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None


def misfit(where: str, new: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Exception:
    expected = f"{tuple(shape)} {dtype} on {device}"
    if isinstance(new, Tensor):
        got = f"{tuple(new.shape)} {new.dtype} on {new.device}"
        return ValueError(f"{where} gave a tensor {got}; expected {expected}")
    return TypeError(
        f"{where} returned a {type(new).__name__}; expected None or a tensor {expected}. "
        "Return the replacement alone, or None to leave the value as it is."
    )


def shown_to(value: Any, is_read_only: bool) -> Any:
    """A copy, so that an edit in place reaches what comes later in the run and nothing else.

    Not the caller's input, not a cache's entry, not what autograd saved. A recorder edits nothing and keeps
    the value itself, unless its memory outlives the run.
    """
    if isinstance(value, Tensor) and (not is_read_only or _is_weight(value)):
        return value.clone()
    return value


def _is_weight(value: Tensor) -> bool:
    """Whether this is memory that outlives the run, or a view of it: a weight, an input being optimised."""
    owner = value if value._base is None else value._base
    return isinstance(owner, nn.Parameter) or (owner.is_leaf and owner.requires_grad)


def can_have_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def takes_hook_keyword(function: Callable[..., Any]) -> bool:
    """Whether the point goes to a parameter named `hook` or into **kwargs, rather than second."""
    if not callable(function):
        raise TypeError(
            f"a hook must be a function of (value, hook), got {function!r} of type {type(function).__name__}"
        )
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a builtin without a signature: assume the documented call
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


def backward_from(output: Any) -> None:
    """Run the backward pass of a scalar; ValueError for anything else."""
    if not isinstance(output, Tensor) or output.numel() != 1:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"incl_bwd needs a scalar output to differentiate, got {got}; ask for return_type='loss'")
    if not output.requires_grad:
        raise ValueError("incl_bwd needs gradients, and none are computed here: is torch.no_grad() on?")
    output.backward()
