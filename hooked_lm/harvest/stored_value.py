"""How activations are stored: their type, and what one vector is the value of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

DTYPES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.int8: 1}  # bytes of a number
SCALE = ":scale"  # the ending of the tensor that holds the scales of int8 values

Vectors = Float[Tensor, "token *width"]
REDUCTIONS: dict[str, Callable[[Vectors], Float[Tensor, "*width"]]] = {
    "mean": lambda vectors: vectors.mean(0),
    "max": lambda vectors: vectors.amax(0),
    "last": lambda vectors: vectors[-1],
}


@dataclass(frozen=True)
class StoredValue:
    """The value of a site for one token: its shape, the type of its numbers on disk, and the names of its axes.

    int8 has one scale for each vector along the last axis: a number is its whole number times the scale, which is the largest
    absolute value of the vector / 127.

    >>> value = StoredValue([4], "int8", ["d_model"])
    >>> stored = value.stored(torch.tensor([[0.0, 1.0, -2.0, 4.0]]))
    >>> value.restored(stored).round(decimals=1)
    tensor([[ 0.,  1., -2.,  4.]])
    """

    shape: Sequence[int]
    dtype: str
    dims: Sequence[str]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the numbers on disk."""
        return getattr(torch, self.dtype)

    def tensors(self, n: int) -> dict[str, tuple[torch.dtype, list[int]]]:
        """The tensors on disk for `n` tokens, by the ending of their names."""
        found = {"": (self.torch_dtype, [n, *self.shape])}
        if self.torch_dtype is torch.int8:
            found[SCALE] = (torch.float32, [n, *self.shape[:-1], 1])
        return found

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token on disk."""
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.tensors(1).values())

    def stored(self, values: Vectors) -> dict[str, Tensor]:
        """Values [token, ...] as they are written, by the ending of the tensor's name."""
        if self.torch_dtype is not torch.int8:
            return {"": values.to(self.torch_dtype)}
        scale = values.float().abs().amax(-1, keepdim=True) / 127
        whole = (values.float() / scale.where(scale > 0, torch.ones(()))).round()
        return {"": whole.to(torch.int8), SCALE: scale}

    def restored(self, stored: dict[str, Int[Tensor, "token *width"] | Vectors]) -> Vectors:
        """The values [token, ...] that were written; those of int8 in float32."""
        if self.torch_dtype is not torch.int8:
            return stored[""]
        return stored[""].float() * stored[SCALE]
