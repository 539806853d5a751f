"""What a function leaves as it found it, wherever it is interrupted: whether gradients are computed, and which hooks are open."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from hooked_lm.hooks import HookedRootModule, scope

P = ParamSpec("P")
R = TypeVar("R")


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, behind which gradients are on or off as before, and no hooks are open that it opened.

    Blocks of `with` see to both; but an interrupt may come between two of their steps. Here both are remembered once, outside.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        gradients, frames = torch.is_grad_enabled(), scope.current()
        try:
            return function(*args, **kwargs)
        finally:
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
