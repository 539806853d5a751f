"""Padding in a run that is cached: the masks that its stacks used, and the columns of a value that hold no token."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.callers import warn_caller
from hooked_lm.hooks.slice import Slice

Masks = dict[
    str, Bool[Tensor, "*batch pos"]
]  # by the first part of the names of sites: "blocks", or "encoder", "decoder"
_masks: ContextVar[Masks | None] = ContextVar("masks", default=None)


@contextmanager
def masks_of_run() -> Iterator[Masks]:
    """Within the block, the first mask of each stack that runs goes into the dict."""
    token = _masks.set({})
    try:
        yield _masks.get()  # type: ignore[misc]  # just set
    finally:
        _masks.reset(token)


def note_mask(stack: str, real: Bool[Tensor, "batch pos"]) -> None:
    """Keeps the mask of a stack for the cache of this run, if there is one."""
    if (masks := _masks.get()) is not None:
        masks.setdefault(stack, real)


def last_real(real: Bool[Tensor, "*batch pos"], where: str) -> Int[Tensor, "*batch"]:
    """The last column of each row that holds a token; ValueError for a row without one.

    >>> last_real(torch.tensor([[True, True, False], [False, True, True]]), "hook_z")
    tensor([1, 2])
    """
    if not real.any(-1).all():
        raise ValueError(f"'{where}' has rows without a real token at the positions that were cached")
    return (real.long() * torch.arange(1, 1 + real.shape[-1], device=real.device)).argmax(-1)


def warn_of_padding(real: Bool[Tensor, "*batch pos"], positions: Slice) -> bool:
    """Warns if positions, as ints or counted from the end, are padding in some rows; returns whether it did."""
    chosen = positions.slice
    if real.is_meta or positions.mode == "identity" or (isinstance(chosen, slice) and (chosen.start or 0) >= 0):
        return False
    padded = ~positions.apply(real.reshape(-1, real.shape[-1]), 1).reshape(real[..., 0].numel(), -1).all(1)
    if not padded.any():
        return False
    rows = padded.nonzero().flatten().tolist()
    shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    which = chosen.tolist() if isinstance(chosen, Tensor) else chosen
    warn_caller(
        f"the selected positions ({which}) are columns, and padding in {len(rows)} of {len(padded)} rows ({shown}): "
        "cache.last(name, layer) reads the last token of each row; or pad on the left, with padding_side='left'"
    )
    return True
