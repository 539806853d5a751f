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
SAMPLED_HEADS, SAMPLED_QUERIES = 4, 128
AT_ONCE = 1 << 17  # values that are coded at once, in the cache of a processor
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
    matrices = [plain(matrix) for matrix in matrices]
    bits = 16 if cells <= FINE_CELLS else 8
    low, high = (math.copysign(math.sqrt(abs(end)), end) for end in _range(matrices))
    coder = _Coder(low, (high - low) / (2**bits - 2), bits, np.tri(n_queries, n_keys, dtype=bool) if causal else None)
    kept = _kept_keys(matrices, coder, max_bytes, n_keys)
    data, coverage = coder.compressed(matrices, kept)
    while len(data) * 4 / 3 > max_bytes:
        fewer = [k for k in KEPT_KEYS if k < (kept or n_keys)]
        if not fewer:
            raise ValueError(
                f"{len(matrices)} heads of {n_queries} x {n_keys} do not fit into {max_bytes} bytes: choose some, heads=[...]"
            )
        kept = fewer[0]
        data, coverage = coder.compressed(matrices, kept)
    return Packed(base64.b64encode(data).decode(), bits, low, coder.step, causal, kept, coverage)


@dataclass(frozen=True)
class _Coder:
    low: float
    step: float
    bits: int
    below: Bool[np.ndarray, "query_pos key_pos"] | None  # the cells that a causal head has

    def compressed(self, matrices: Sequence[Matrix], kept: int | None, every: int = 1) -> tuple[bytes, float]:
        """The codes of each `every`-th row as gzip, and the share of the sum of absolute values that they have."""
        packer = zlib.compressobj(6, zlib.DEFLATED, 31, 8, zlib.Z_RLE)  # weights repeat, their sequences do not
        parts, some, whole = list[bytes](), 0.0, 0.0
        some_rows = max(1, AT_ONCE // matrices[0].shape[1])
        for matrix in matrices:
            below = None if self.below is None else self.below[::every]
            for start in range(0, len(matrix[::every]), some_rows):
                rows = slice(start, start + some_rows)
                values = matrix[::every][rows]
                shown = _strongest(values, kept)
                if shown is not values:
                    some, whole = some + _size(shown), whole + _size(values)
                parts.append(packer.compress(self._codes(shown, None if below is None else below[rows])))
        return b"".join([*parts, packer.flush()]), some / whole if whole else 1.0

    def _codes(self, shown: Matrix, below: Bool[np.ndarray, "query_pos key_pos"] | None) -> bytes:
        roots = shown.abs().sqrt_().copysign_(shown)
        kind, missing = ("<u2", 2**16 - 1) if self.bits == 16 else ("u1", 2**8 - 1)
        codes = roots.sub_(self.low).div_(self.step).round_().nan_to_num_(nan=missing).numpy().astype(kind)
        return (codes if below is None else codes[below]).tobytes()


def _size(matrix: Matrix) -> float:
    return float(matrix.abs().nansum(dtype=torch.float64))


def plain(matrix: Matrix) -> Matrix:
    """In fp32 on the CPU; what is infinite or masked is NaN."""
    plain = matrix.detach().to("cpu", torch.float32)
    low, high = plain.aminmax()  # NaN if any is
    if low > HIDDEN and high < torch.inf:
        return plain
    return plain.where((plain > HIDDEN) & (plain < torch.inf), torch.nan)


def _is_causal(matrix: Matrix) -> bool:
    if not matrix.detach().triu(1).any():
        return True
    return bool((matrix.detach()[torch.ones_like(matrix, dtype=torch.bool).triu(1)] <= HIDDEN).all())


def _range(matrices: Sequence[Matrix]) -> tuple[float, float]:
    """From zero, or the lowest negative value, to one, or the highest value above."""
    ends = [matrix.nan_to_num().aminmax() for matrix in matrices]
    return min(0.0, *(float(low) for low, _ in ends)), max(1.0, *(float(high) for _, high in ends))


def _strongest(matrix: Matrix, kept: int | None) -> Matrix:
    """The values, with zero for those below the `kept` largest of their row in absolute value; what is missing stays so."""
    if kept is None or kept >= matrix.shape[1]:
        return matrix
    size = matrix.abs().nan_to_num(0.0)
    least = size.topk(kept, -1).values[:, -1:]
    return matrix.where((size >= least) | matrix.isnan(), 0.0)


def _kept_keys(matrices: Sequence[Matrix], coder: _Coder, max_bytes: int, n_keys: int) -> int | None:
    """How many keys of each query fit, as a sample of the heads and queries says; None for all."""
    sample, n_queries = matrices[:: -(-len(matrices) // SAMPLED_HEADS)], len(matrices[0])
    every = -(-n_queries // SAMPLED_QUERIES)
    share = len(sample) * -(-n_queries // every) / (len(matrices) * n_queries)

    def fits(kept: int | None) -> bool:
        return len(coder.compressed(sample, kept, every)[0]) <= max_bytes * 3 / 4 * share

    options = [k for k in KEPT_KEYS if k < n_keys]
    return None if fits(None) else [*options, 1][bisect_left(options, True, key=fits)]
