"""A weight that stays in memory as a checkpoint has it: the tensors of its format, from which each use computes the values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Raw = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Kept:
    """The tensors of a quantised weight, and the function that computes its values, of this shape and contiguous.

    Several parameters may share it, as the experts of one tensor do, and the parts of a fused matrix.

    >>> import torch
    >>> kept = Kept(
    ...     "halves",
    ...     lambda raw: raw["w"] / 2,
    ...     {"w": torch.tensor([[1, 2], [3, 4]])},
    ...     (2, 2),
    ...     torch.float32,
    ... )
    >>> kept.as_strided((2,), (1,), 2), kept.nbytes
    (tensor([1.5000, 2.0000]), 32)
    """

    method: str  # how the weight is quantised, in words
    values: Callable[[Raw], Tensor]
    raw: Raw
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: WeakValueDictionary[str, "Kept"] = field(
        default_factory=WeakValueDictionary, repr=False
    )  # by their devices

    @property
    def device(self) -> torch.device:
        return next(iter(self.raw.values())).device

    @property
    def nbytes(self) -> int:
        """The memory of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.raw.values())

    def to(self, device: torch.device) -> "Kept":
        """The same on another device, where there is one copy for all parameters that share it."""
        if device == self.device:
            return self
        if (copied := self.copies.get(str(device))) is None:
            raw = {name: tensor.to(device) for name, tensor in self.raw.items()}
            copied = self.copies[str(device)] = replace(self, raw=raw, copies=WeakValueDictionary())
        return copied

    def as_strided(self, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """A view of the values, by strides and an offset as those of `Tensor.as_strided`.

        Only the rows of the first axis that it needs are computed, if each tensor has that axis, as those of experts do.
        """
        if self.device.type == "meta":
            return torch.empty_strided(shape, stride, dtype=self.dtype, device="meta")
        raw = self.raw
        if all(tensor.ndim > 1 and len(tensor) == self.shape[0] for tensor in raw.values()):
            row = prod(self.shape[1:])
            end = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            first = offset // row
            raw = {name: tensor[first : end // row + 1] for name, tensor in raw.items()}
            offset -= first * row
        return self.values(raw).as_strided(shape, stride, offset)
