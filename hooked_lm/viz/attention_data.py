"""Attention as bytes that fit into a page: rounded, without what a causal mask hides, and compressed."""

import base64
import math
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

MOST_CELLS = 200_000_000  # bytes that a browser holds after decompression
FINE_CELLS = 500_000  # below this the values have 16 bits, otherwise 8
KEPT_KEYS = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1)
SAMPLED_HEADS = 4
HIDDEN = -1e30  # scores below are those of a mask

Matrix = Float[Tensor, "query_pos key_pos"]


@dataclass(frozen=True)
class Packed:
    """Heads in order, row after row, as base64 of gzip. A value is the square of `low + code * step`, with its sign, so that
    small ones stay distinct; the largest code is a missing value.

    With `causal` a row ends at its own position. `kept` is the number of keys of each query that were kept (None: all), and
    `coverage` the share of the sum of absolute values that they have.
    """

    data: str
    bits: int
    low: float
    step: float
    causal: bool
    kept: int | None
    coverage: float


def pack(matrices: Sequence[Matrix], max_bytes: int) -> Packed:
    """The values of heads in at most `max_bytes` of text; if all do not fit, the largest of each row.

    Raises ValueError if not even the largest value of each row fits.

    >>> packed = pack([torch.tensor([[1.0, 0.0], [0.25, 0.75]])], 1000)
    >>> packed.causal, packed.bits, packed.kept
    (True, 16, None)
    """
    n_queries, n_keys = matrices[0].shape
    cells = len(matrices) * n_queries * n_keys
    if cells > MOST_CELLS:
        raise ValueError(
            f"{len(matrices)} heads of {n_queries} x {n_keys} are too many for a page: choose some, heads=[...]"
        )
    causal = n_queries == n_keys and all(_is_causal(matrix) for matrix in matrices)
    bits = 16 if cells <= FINE_CELLS else 8
    low, high = (math.copysign(math.sqrt(abs(end)), end) for end in _range(matrices))
    coder = _Coder(low, (high - low) / (2**bits - 2), bits, np.tri(n_queries, n_keys, dtype=bool) if causal else None)
    kept = _kept_keys(matrices, coder, max_bytes, n_keys)
    while len(data := coder.compressed(matrices, kept)) * 4 / 3 > max_bytes:
        fewer = [k for k in KEPT_KEYS if k < (kept or n_keys)]
        if not fewer:
            raise ValueError(
                f"{len(matrices)} heads of {n_queries} x {n_keys} do not fit into {max_bytes} bytes: choose some, heads=[...]"
            )
        kept = fewer[0]
    coverage = 1.0 if kept is None else _coverage(matrices, kept)
    return Packed(base64.b64encode(data).decode(), bits, low, coder.step, causal, kept, coverage)


@dataclass(frozen=True)
class _Coder:
    low: float
    step: float
    bits: int
    below: Bool[np.ndarray, "query_pos key_pos"] | None  # the cells that a causal head has

    def compressed(self, matrices: Sequence[Matrix], kept: int | None) -> bytes:
        """The codes of all cells, as gzip."""
        packer = zlib.compressobj(6, zlib.DEFLATED, 31, 8, zlib.Z_RLE)  # weights repeat, their sequences do not
        return b"".join([*(packer.compress(self._codes(matrix, kept)) for matrix in matrices), packer.flush()])

    def _codes(self, matrix: Matrix, kept: int | None) -> bytes:
        shown = _strongest(plain(matrix), kept)
        shown = shown.abs().sqrt().copysign(shown)
        kind, missing = ("<u2", 2**16 - 1) if self.bits == 16 else ("u1", 2**8 - 1)
        codes = ((shown - self.low) / self.step).round().nan_to_num(nan=missing).numpy().astype(kind)
        return (codes if self.below is None else codes[self.below]).tobytes()


def plain(matrix: Matrix) -> Matrix:
    """In fp32 on the CPU; what is infinite or masked is NaN."""
    plain = matrix.detach().to("cpu", torch.float32)
    return plain.where((plain > HIDDEN) & (plain < torch.inf), torch.nan)


def _is_causal(matrix: Matrix) -> bool:
    above = matrix.detach()[torch.ones_like(matrix, dtype=torch.bool).triu(1)]
    return bool((above == 0).all() or (above <= HIDDEN).all())


def _range(matrices: Sequence[Matrix]) -> tuple[float, float]:
    """From zero, or the lowest negative value, to one, or the highest value above."""
    ends = [plain(matrix).nan_to_num().aminmax() for matrix in matrices]
    return min(0.0, *(float(low) for low, _ in ends)), max(1.0, *(float(high) for _, high in ends))


def _strongest(matrix: Matrix, kept: int | None) -> Matrix:
    """The values, with zero for those below the `kept` largest of their row in absolute value; what is missing stays so."""
    if kept is None or kept >= matrix.shape[1]:
        return matrix
    size = matrix.abs().nan_to_num(0.0)
    least = size.topk(kept, -1).values[:, -1:]
    return matrix.where((size >= least) | matrix.isnan(), 0.0)


def _kept_keys(matrices: Sequence[Matrix], coder: _Coder, max_bytes: int, n_keys: int) -> int | None:
    """How many keys of each query fit, as a sample of the heads says; None for all."""
    sample = matrices[:: -(-len(matrices) // SAMPLED_HEADS)]
    room = max_bytes * 3 / 4 * len(sample) / len(matrices)
    if len(coder.compressed(sample, None)) <= room:
        return None
    options = [k for k in KEPT_KEYS if k < n_keys]
    first = bisect_left(options, True, key=lambda kept: len(coder.compressed(sample, kept)) <= room)
    return [*options, 1][first]


def _coverage(matrices: Sequence[Matrix], kept: int) -> float:
    """The share of the sum of absolute values that the largest of each row have."""
    shown = whole = 0.0
    for matrix in matrices:
        size = plain(matrix).abs().nan_to_num(0.0)
        shown, whole = shown + float(size.topk(kept, -1).values.sum()), whole + float(size.sum())
    return shown / whole if whole else 1.0
