"""What a format of quantised weights has to say, and the numbers that several formats share."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from hooked_lm.weights.shards import Headers

# The numbers of 4 bits with 2 bits of exponent, by their bits.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
Header = tuple[tuple[int, ...], torch.dtype]


class Format(ABC):
    """One way to store a weight as several tensors, whose names begin alike.

    `parts` are the endings of the names of the tensors that each such weight has, and `more` those of tensors that it may have;
    `weight` is the ending of its own name; the matrix [out, in] is `transposed` if it is [in, out] in memory.
    """

    parts: tuple[str, ...]
    more: tuple[str, ...] = ()
    weight: str = ".weight"
    transposed: bool = False

    @abstractmethod
    def header(self, raw: Headers, wanted: torch.dtype) -> Header:
        """The shape and dtype of a weight, whose tensors `raw` has by their endings.

        The dtype is the one wanted, unless the format itself rounds to another.
        """

    @abstractmethod
    def value(self, raw: Headers, wanted: torch.dtype) -> Float[Tensor, "..."]:
        """The weight, with this shape and dtype."""


def unpack(words: Int[Tensor, "*rows words"], bits: int) -> UInt8[Tensor, "*rows numbers"]:
    """The numbers of some bits that words of 32 bits hold, the lowest bits first.

    >>> unpack(torch.tensor([0x87654321 - 2**32], dtype=torch.int32), 4).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def look_up(
    pairs: Shaped[Tensor, "*rows bytes"], table: Float[Tensor, "16"] = FP4, low_first: bool = True
) -> Float[Tensor, "*rows numbers"]:
    """The entries of a table at the places of which each byte holds two.

    >>> look_up(torch.tensor([0x21, 0xF0], dtype=torch.uint8)).tolist()
    [0.5, 1.0, 0.0, -6.0]
    """
    table = table.to(pairs.device)
    both = torch.cartesian_prod(table, table)  # of each byte, the higher bits first
    return F.embedding(pairs.contiguous().view(torch.uint8).int(), both.flip(-1) if low_first else both).flatten(-2)


def as_numbers(stored: Shaped[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Numbers of 8 bits, integers or not, in another dtype. A table is ten times as fast as torch's conversion on a CPU."""
    if not stored.is_floating_point():
        return stored.to(dtype)
    table = torch.arange(256, dtype=torch.uint8, device=stored.device).view(stored.dtype).to(dtype)
    return table.index_select(0, stored.contiguous().view(torch.uint8).flatten().int()).view(stored.shape)


def as_scales(scales: Shaped[Tensor, "*grid"]) -> Float[Tensor, "*grid"]:
    """Scales as numbers; a byte is the exponent of a power of two, plus 127.

    >>> as_scales(torch.tensor([126, 130], dtype=torch.uint8)).tolist()
    [0.5, 8.0]
    """
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def spread(
    scales: Shaped[Tensor, "..."], shape: tuple[int, ...], block: tuple[int, int] | None = None
) -> Shaped[Tensor, "..."]:
    """Scales, or zeros, of the blocks of a matrix [..., rows, columns], repeated for each of its numbers.

    `block` is the size of a block; the last ones of a row or column may be cut off. A grid that does not fit it divides the
    matrix evenly, as one scale for each row does. Raises ValueError for a grid that does neither.

    >>> (
    ...     spread(torch.tensor([[1, 2]]), (1, 5), (2, 3)).tolist(),
    ...     spread(torch.tensor([[1], [2]]), (2, 2)).tolist(),
    ... )
    ([[1, 1, 1, 2, 2]], [[1, 1], [2, 2]])
    """
    rows, columns = shape[-2:]
    if scales.ndim < 2:
        scales = scales.reshape(-1, 1)
    grid = tuple(scales.shape[-2:])
    if block is None or grid != (-(-rows // block[0]), -(-columns // block[1])):
        if rows % grid[0] or columns % grid[1]:
            said = "" if block is None else f", and the config says blocks of {block[0]} x {block[1]}"
            raise ValueError(f"{grid[0]} x {grid[1]} scales do not fit a weight of {rows} x {columns}{said}")
        block = rows // grid[0], columns // grid[1]
    whole = scales[..., :, None, :, None].expand(*scales.shape[:-1], block[0], grid[1], block[1])
    return whole.flatten(-2).flatten(-3, -2)[..., :rows, :columns]
