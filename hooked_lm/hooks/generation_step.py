"""Where a growing text is being read: what `hook.step` and `hook.positions` answer during generation."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Reading:
    """One pass over the last `n_new` columns of a text of which `real` [batch, pos] says what is no padding.

    All passes of one generation have the same object `text`, by which two generations that take turns are distinguished.

    >>> import torch
    >>> real = torch.tensor([[False, True, True], [True, True, True]])
    >>> Reading(step=1, real=real, n_new=2).positions
    tensor([[0, 1],
            [1, 2]])
    """

    def __init__(self, step: int, real: Tensor, n_new: int, text: object = None) -> None:
        self.step, self.real, self.n_new, self.text = step, real, n_new, text

    @cached_property
    def positions(self) -> Tensor:
        """Where in their rows the new tokens stand: [new], or [batch, new] if the rows differ; padding is -1."""
        counted = (self.real.long().cumsum(1) - 1).masked_fill(~self.real, -1)[:, -self.n_new :]
        return counted[0] if (counted == counted[0]).all() else counted


_now: ContextVar[Reading | None] = ContextVar("reading", default=None)


def current() -> Reading | None:
    """The pass that this thread or task is in, if it generates."""
    return _now.get()


def show(reading: Reading | None) -> None:
    """Let hooks know what is being read, from here on."""
    _now.set(reading)


def generating(work: Callable[[], T], scope: AbstractContextManager[Any] | None = None) -> T:
    """What `work` returns, run without gradients and, if one is given, inside a scope of hooks.

    At the end torch's grad mode and the reading are those of the caller again and the scope is closed, whatever was raised
    and wherever a KeyboardInterrupt came in, also during the restoring itself: so it stands there twice.
    """
    grad_mode, reading, opened = torch.is_grad_enabled(), current(), ExitStack()

    def restore() -> None:
        torch.set_grad_enabled(grad_mode)
        show(reading)
        opened.close()

    try:
        try:
            opened.enter_context(nullcontext() if scope is None else scope)
            torch.set_grad_enabled(False)
            return work()
        finally:
            restore()
    finally:
        restore()
