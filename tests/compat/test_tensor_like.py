"""Factors and operands of a `FactoredMatrix` that are not tensors: products need `TensorLike` alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hooked_lm.errors import ArgumentError
from hooked_lm.factored_matrix import FactoredMatrix, TensorLike
from tests.close import assert_close


class Wrapped:
    """A tensor that knows no more than products need."""

    def __init__(self, x: Any) -> None:
        self.x: Tensor = plain(x)

    ndim = property(lambda self: self.x.ndim)
    shape = property(lambda self: self.x.shape)

    def size(self, dim: int) -> int:
        return self.x.size(dim)

    def unsqueeze(self, dim: int) -> "Wrapped":
        return Wrapped(self.x.unsqueeze(dim))

    def squeeze(self, dim: int) -> "Wrapped":
        return Wrapped(self.x.squeeze(dim))

    def broadcast_to(self, size: Any) -> "Wrapped":
        return Wrapped(self.x.broadcast_to(size))

    def __matmul__(self, other: Any) -> "Wrapped":
        return Wrapped(self.x @ plain(other)) if isinstance(other, TensorLike) else NotImplemented

    def __rmatmul__(self, other: Any) -> "Wrapped":
        return Wrapped(plain(other) @ self.x)


def plain(x: Any) -> Any:
    return x.x if isinstance(x, Wrapped) else x


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(x: Any) -> Any:
    return plain(x.A @ x.B if isinstance(x, FactoredMatrix) else x)


@pytest.mark.parametrize("mdim", [2, 9])
@pytest.mark.parametrize("factors", ["A", "B", "AB", ""])
def test_products(factors: str, mdim: int) -> None:
    A, B = numbers(3, 5, mdim), numbers(3, mdim, 4, seed=1)
    matrix = FactoredMatrix(*(Wrapped(x) if name in factors else x for name, x in zip("AB", (A, B), strict=True)))  # type: ignore[arg-type]
    assert (matrix.shape, matrix.ldim, matrix.mdim, matrix.rdim) == ((3, 5, 4), 5, mdim, 4)
    assert_close(product(matrix), A @ B)
    right, left = numbers(4, 6, seed=2), numbers(7, 5, seed=3)
    column, row = numbers(4, seed=4), numbers(5, seed=5)
    for wrap in (lambda x: x, Wrapped):
        assert_close(product(matrix @ wrap(right)), A @ B @ right)
        assert_close(product(matrix @ wrap(column)), A @ B @ column)
        assert_close(product(wrap(left) @ matrix), left @ (A @ B))
        assert_close(product(wrap(row) @ matrix), row @ (A @ B))
        with pytest.raises(ArgumentError):
            matrix @ wrap(left)


def test_what_is_no_tensor_is_refused() -> None:
    matrix = FactoredMatrix(numbers(5, 2), numbers(2, 4))
    assert not isinstance(np.ones((4, 4)), TensorLike)
    for other in (np.ones((4, 4)), 3, [[1.0]]):
        with pytest.raises(TypeError):
            matrix @ other  # type: ignore[operator]
    with pytest.raises(TypeError):
        [[1.0]] @ matrix  # type: ignore[operator]
