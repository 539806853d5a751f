"""A decorator that restores the grad mode, torch's modes and the open hooks, wherever a function is interrupted."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from hooked_lm.hooks import HookedRootModule, scope

P = ParamSpec("P")
R = TypeVar("R")


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which leaves the grad mode as it was, and no mode of torch and no hook open that it opened.

    Blocks of `with` see to that; but an interrupt may come between two of their steps. Here it is remembered once, outside.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        gradients, frames, n_modes = torch.is_grad_enabled(), scope.current(), torch._C._len_torch_function_stack()
        try:
            return function(*args, **kwargs)
        finally:
            while torch._C._len_torch_function_stack() > n_modes:
                torch._C._pop_torch_function_stack()
            torch.set_grad_enabled(gradients)
            _close(frames)

    return call


def _close(before: tuple[scope.Frame, ...]) -> None:
    """Close the scopes that are open here and were not before."""
    for frame in reversed(scope.current()):
        if frame not in before and isinstance(frame.root, HookedRootModule):
            points = list(frame.root.hook_points())
            scope.drop(frame)
            for point in points:
                point.uninstall(frame)
