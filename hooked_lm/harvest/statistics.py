"""Mean and variance of vectors that come in parts (Chan, Golub & LeVeque 1983)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class Statistics:
    """The number of vectors, their mean, and M2: the sum of squared differences from the mean.

    >>> vectors, both = torch.randn(10, 3), Statistics([3])
    >>> both.add(vectors[:4])
    >>> both.add(vectors[4:])
    >>> bool(torch.allclose(both.variance, vectors.double().var(0, unbiased=False)))
    True
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.n = 0
        self.mean = torch.zeros(*shape, dtype=torch.float64)
        self.m2 = torch.zeros(*shape, dtype=torch.float64)

    @property
    def variance(self) -> Float[Tensor, "*width"]:
        """The variance of each number over the vectors."""
        return self.m2 / max(1, self.n)

    def add(self, vectors: Float[Tensor, "token *width"], site: str = "", dtype: str = "") -> None:
        """Adds vectors. Raises FloatingPointError, with the site, for values that are not finite."""
        if not len(vectors):
            return
        mean = vectors.mean(0, dtype=torch.float64)
        if not bool(mean.isfinite().all()):
            raise FloatingPointError(
                f"'{site}' has values that are not finite in {dtype}: nothing of this shard is kept; "
                "bfloat16 and float32 hold larger values than float16"
            )
        m2 = (
            (vectors - mean.to(vectors.dtype if vectors.dtype == torch.float64 else torch.float32))
            .square()
            .sum(0, dtype=torch.float64)
        )
        self._merge(len(vectors), mean, m2)

    def merge(self, about: Mapping[str, Any], n: int) -> None:
        """Adds the statistics of `n` other vectors, as `about` gives them."""
        if n:
            shape = self.mean.shape
            both = (torch.tensor(about[name], dtype=torch.float64).reshape(shape) for name in ("mean", "m2"))
            self._merge(n, *both)

    def _merge(self, n: int, mean: Tensor, m2: Tensor) -> None:
        whole, difference = self.n + n, mean - self.mean
        self.mean = self.mean + difference * (n / whole)
        self.m2 = self.m2 + m2 + difference.square() * (self.n * n / whole)
        self.n = whole

    def about(self) -> dict[str, Any]:
        """Mean and M2 as lists, for JSON."""
        return {"mean": self.mean.flatten().tolist(), "m2": self.m2.flatten().tolist()}
