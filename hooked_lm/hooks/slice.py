"""Slice: a selection along one axis of a tensor."""

import operator
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

SliceInput = SupportsIndex | tuple[int | None, ...] | list[int] | Tensor | np.ndarray | slice | None
"""What `Slice` takes: an index, which drops the axis; a tuple, which is a range; a list or array of indices; None: everything."""


class Slice:
    """A selection along one axis of a tensor.

    `None` selects everything; an int, or a tensor or array of one without axes, one index, and removes the axis; a tuple
    `(start, stop[, step])` a range; a list, array or tensor of ints these indices in this order, of bools the indices of True.
    Raises ValueError for anything else.

    >>> import torch
    >>> Slice((0, 2)).apply(torch.arange(12).view(3, 4), dim=1)
    tensor([[0, 1],
            [4, 5],
            [8, 9]])
    """

    def __init__(self, input_slice: SliceInput = None) -> None:
        self.slice: int | slice | Tensor
        if isinstance(input_slice, (Tensor, np.ndarray)) and input_slice.ndim == 0:
            one: Any = input_slice.item()
            input_slice = one
        if input_slice is None:
            self.slice, self.mode = slice(None), "identity"
        elif isinstance(input_slice, slice):
            self.slice, self.mode = input_slice, "slice"
        elif isinstance(input_slice, tuple):
            self.slice, self.mode = slice(*input_slice), "slice"
        elif isinstance(input_slice, (list, Tensor, np.ndarray)):
            self.slice, self.mode = _indices(torch.as_tensor(input_slice)), "array"
        elif isinstance(input_slice, SupportsIndex):
            self.slice, self.mode = operator.index(input_slice), "int"
        else:
            raise _unusable(input_slice)

    @classmethod
    def unwrap(cls, slice_input: "Slice | SliceInput") -> "Slice":
        """The slice, or one made from the input; an int then keeps its axis, with length 1."""
        if isinstance(slice_input, Slice):
            return slice_input
        made = cls(slice_input)
        return cls([made.slice]) if isinstance(made.slice, int) else made

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The selected part of a tensor along `dim`; a view, except for lists of indices. Raises IndexError out of range."""
        if self.mode == "identity":
            return tensor
        length = tensor.shape[dim]
        if isinstance(self.slice, (int, Tensor)):
            for wrong in (i for i in torch.as_tensor(self.slice).flatten().tolist() if not -length <= i < length):
                raise IndexError(
                    f"index {wrong} is out of range: the axis has length {length}, so {-length} to {length - 1}"
                )
        if isinstance(self.slice, Tensor):
            index = self.slice.to(tensor.device)
            return tensor.index_select(dim, torch.where(index < 0, index + tensor.shape[dim], index))
        return tensor[(slice(None),) * (dim % tensor.ndim) + (self.slice,)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray:
        """The selected indices of an axis of length `max_ctx` (not needed for an int)."""
        if self.mode == "int":
            return np.array([self.slice])
        if max_ctx is None:
            raise ValueError("the indices of a slice depend on the length of the axis: pass max_ctx")
        return torch.arange(max_ctx)[self.slice].numpy()

    def slice_len(self, max_ctx: int | None = None) -> int:
        """The number of selected indices."""
        return len(self.indices(max_ctx))

    def __repr__(self) -> str:
        return f"Slice({self.slice!r})"


def _indices(chosen: Tensor) -> Tensor:
    """The indices as ints; for a mask the indices of True."""
    if chosen.dtype == torch.bool:
        return chosen.nonzero().flatten()
    if chosen.numel() and (chosen.is_floating_point() or chosen.is_complex()):
        raise _unusable(chosen)
    return chosen.long()


def _unusable(chosen: object) -> ValueError:
    return ValueError(
        f"cannot slice by {chosen!r}: pass None, an int, a (start, stop) tuple, or a list or array of ints"
    )
