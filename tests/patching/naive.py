"""The reference of all tests of patching: one forward pass for every cell, and values exchanged one position at a time.

It shares nothing with the engine but the meaning of an edit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hooked_lm.hooks import HookedRootModule
from hooked_lm.patching import Edit, Rewrite

Change = Edit | Rewrite


def exchanged(value: Tensor, dims: Sequence[str], edit: Edit) -> Tensor:
    """The value of a site with an edit in it."""
    new = value.clone()
    axis = next((dims.index(name) for name in ("query_pos", "pos") if name in dims), None)
    if axis is None:  # tokens of a routed site have no positions
        assert edit.positions is None, f"{edit.site} has no positions"
        new[(slice(None), *edit.rest)] = given(edit, new[(slice(None), *edit.rest)], value.shape, None)
        return new
    for pos in range(value.shape[axis]) if edit.positions is None else edit.positions:
        where: list[Any] = [slice(None)] * value.ndim
        where[axis] = pos
        others = [i for i in range(1, value.ndim) if i != axis]  # what `rest` indexes, in order
        for i, index in zip(others, edit.rest, strict=False):
            where[i] = index
        if isinstance(edit.value, Tensor):
            new[tuple(where)] = torch.broadcast_to(edit.value, value.shape)[tuple(where)].to(new)
        else:
            new[tuple(where)] = edit.value(new[tuple(where)].unsqueeze(1)).squeeze(1)
    return new


def given(edit: Edit, there: Tensor, shape: torch.Size, axis: int | None) -> Tensor:
    """What an edit says of a whole value."""
    if isinstance(edit.value, Tensor):
        return torch.broadcast_to(edit.value, shape)[(slice(None), *edit.rest)].to(there)
    return edit.value(there)
