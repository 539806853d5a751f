"""The current step of generation, from which `hook.step` and `hook.positions` are computed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from hooked_lm.hooks.token_labels import Labels

T = TypeVar("T")


class GenerationStep:
    """One forward pass over the last `n_new` columns of a text; `real` [batch, pos] is False at padding.

    All steps of one generation share the object `text`, which distinguishes interleaved generations. `labels` say what the real
    tokens of each row are, if the prompt is a conversation. While a prompt is read in pieces `step` is negative: minus the
    number of tokens of the prompt that come after this pass.

    >>> import torch
    >>> real = torch.tensor([[False, True, True], [True, True, True]])
    >>> GenerationStep(step=1, real=real, n_new=2).positions
    tensor([[0, 1],
            [1, 2]])
    """

    def __init__(
        self, step: int, real: Tensor, n_new: int, text: object = None, labels: Sequence[Labels] | None = None
    ) -> None:
        self.step, self.real, self.n_new, self.text, self.labels = step, real, n_new, text, labels

    def piece(self, end: int, n_new: int) -> "GenerationStep":
        """The pass over the `n_new` columns before column `end`, a piece of those of this one."""
        return GenerationStep(self.step - self.real.shape[1] + end, self.real[:, :end], n_new, self.text, self.labels)

    @cached_property
    def positions(self) -> Tensor:
        """The positions of the new tokens in their rows: [new], or [batch, new] if the rows differ; padding is -1."""
        counted = (self.real.long().cumsum(1) - 1).masked_fill(~self.real, -1)[:, -self.n_new :]
        return counted[0] if (counted == counted[0]).all() else counted


_now: ContextVar[GenerationStep | None] = ContextVar("generation_step", default=None)


def current() -> GenerationStep | None:
    """The step of generation in this thread or task; None outside of generation."""
    return _now.get()


def set_current(step: GenerationStep | None) -> None:
    """Sets the step that `current` returns."""
    _now.set(step)


def run_generation(work: Callable[[], T], scope: AbstractContextManager[object] | None = None) -> T:
    """Returns `work()`, run without gradients and inside a scope of hooks if one is passed.

    Afterwards torch's grad mode and the step are restored and the scope is closed, also after an error. `restore` is called
    twice, because a KeyboardInterrupt may interrupt the first call.
    """
    grad_mode, outer, opened = torch.is_grad_enabled(), current(), ExitStack()

    def restore() -> None:
        torch.set_grad_enabled(grad_mode)
        set_current(outer)
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
