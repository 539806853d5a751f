"""The reference of all tests of patching: one forward pass for every cell, with values patched one position at a time.

It shares nothing with the engine but the meaning of an edit.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hooked_lm.hooks import HookedRootModule
from hooked_lm.patching import Edit, Rewrite
from tests.unchecked import unchecked

Change = Edit | Rewrite


@torch.no_grad()
def naive(model: HookedRootModule, tokens: Tensor, cell: Iterable[Change], base: Iterable[Change] = ()) -> Tensor:
    """The logits of one cell, in a run with the changes of `base` first."""
    with unchecked():
        return model.run_with_hooks(tokens, fwd_hooks=[(change.site, hook(change)) for change in (*base, *cell)])


def hook(change: Change) -> Callable[..., Tensor]:
    """A change, as a plain hook."""

    def changed(value: Tensor, hook: Any) -> Tensor:
        if value.ndim > len(hook.dims):  # copies of the stream, one for each head
            return torch.stack([changed(copy, hook) for copy in value.unbind(2)], 2)
        return change.function(value) if isinstance(change, Rewrite) else exchanged(value, hook.dims, change)

    return changed


def exchanged(value: Tensor, dims: Sequence[str], edit: Edit) -> Tensor:
    """The value of a site with an edit applied position by position; sites of experts have no positions, only tokens."""
    new = value.clone()
    axis = next((dims.index(name) for name in ("query_pos", "pos", "patch", "key_pos") if name in dims), None)
    if axis is None:
        assert edit.positions is None
        whole = torch.broadcast_to(edit.value, value.shape) if isinstance(edit.value, Tensor) else edit.value(value)
        return whole.to(value)
    for pos in range(value.shape[axis]) if edit.positions is None else set(edit.positions):
        where: list[Any] = [slice(None)] * value.ndim
        where[axis] = pos
        others = [i for i in range(1, value.ndim) if i != axis]  # the axes that `rest` indexes, in order
        for i, index in zip(others, edit.rest, strict=False):
            where[i] = index
        if isinstance(edit.value, Tensor):
            new[tuple(where)] = torch.broadcast_to(edit.value, value.shape)[tuple(where)].to(new)
        else:
            new[tuple(where)] = edit.value(new[tuple(where)].unsqueeze(1)).squeeze(1)
    if edit.rows is not None:
        new, changed = value.clone(), new
        new[edit.rows] = changed[edit.rows]
    return new
