"""A decorator that restores the grad mode, torch's function modes and hooks, even after a KeyboardInterrupt."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from hooked_lm.hooks import HookedRootModule, scope

P = ParamSpec("P")
R = TypeVar("R")


def keeps_torch_state(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function to restore the grad mode, and to close torch function modes and hooks that it opened.

    Context managers inside the function do so too, but an interrupt may come between two of their steps.
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
    """Closes the hook scopes that are open now and are not in `before`."""
    for frame in reversed(scope.current()):
        if frame not in before and isinstance(frame.root, HookedRootModule):
            points = list(frame.root.hook_points())
            scope.drop(frame)
            for point in points:
                point.uninstall(frame)
