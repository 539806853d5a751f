"""Slice: which part of one axis to take, said as an int, a range, a list or nothing."""

import operator
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor

SliceInput = SupportsIndex | tuple[int | None, ...] | list[int] | Tensor | np.ndarray | slice | None


class Slice:
    """A part of one axis of a tensor.

    `None` is everything, an int one index (the axis goes), a tuple `(start, stop[, step])` a range, a list,
    array or tensor of ints these indices in that order, of bools those that are True. Raises ValueError for
    anything else.

    >>> import torch
    >>> Slice((0, 2)).apply(torch.arange(12).view(3, 4), dim=1)
    tensor([[0, 1],
            [4, 5],
            [8, 9]])
    """

    def __init__(self, input_slice: SliceInput = None) -> None:
        self.slice: int | slice | Tensor
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
        """The slice itself, or one made of the input in which an int keeps its axis, with length 1."""
        if isinstance(slice_input, Slice):
            return slice_input
        made = cls(slice_input)
        return cls([made.slice]) if isinstance(made.slice, int) else made

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The part of the tensor along `dim`; a view, except for lists of indices. Raises IndexError out of range."""
        if self.mode == "identity":
            return tensor
        length = tensor.shape[dim]
        if isinstance(self.slice, (int, Tensor)):
            for wrong in (i for i in torch.as_tensor(self.slice).flatten().tolist() if not -length <= i < length):
                raise IndexError(f"index {wrong} is out of range: the axis has {length}, so {-length} to {length - 1}")
        if isinstance(self.slice, Tensor):
            index = self.slice.to(tensor.device)
            return tensor.index_select(dim, torch.where(index < 0, index + tensor.shape[dim], index))
        return tensor[(slice(None),) * (dim % tensor.ndim) + (self.slice,)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray:
        """The indices that this selects from an axis of length `max_ctx` (an int alone needs none)."""
        if self.mode == "int":
            return np.array([self.slice])
        if max_ctx is None:
            raise ValueError("a slice knows its indices only with max_ctx, the length of the axis")
        return torch.arange(max_ctx)[self.slice].numpy()

    def slice_len(self, max_ctx: int | None = None) -> int:
        """How many indices that is."""
        return len(self.indices(max_ctx))

    def __repr__(self) -> str:
        return f"Slice({self.slice!r})"


def _indices(chosen: Tensor) -> Tensor:
    """Ints as they are, of a mask the places where it is true."""
    if chosen.dtype == torch.bool:
        return chosen.nonzero().flatten()
    if chosen.numel() and (chosen.is_floating_point() or chosen.is_complex()):
        raise _unusable(chosen)
    return chosen.long()


def _unusable(chosen: object) -> ValueError:
    return ValueError(
        f"cannot slice by {chosen!r}: give None, an int, a (start, stop) tuple, a list or an array of ints"
    )
