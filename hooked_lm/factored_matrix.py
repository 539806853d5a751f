"""A matrix in factored form, such as a head's `W_V @ W_O`, with operations that use the small inner dimension.

Vocabulary: the matrix is `[..., ldim, rdim]`, its factors are `A [..., ldim, mdim]` and `B [..., mdim, rdim]`, and the
dimensions before the last two are leading dimensions. With k the smallest of ldim, mdim and rdim, the matrix has k
singular values.
"""

import operator
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from hooked_lm.errors import ArgumentError
from hooked_lm.notebook_repr import NotebookRepr, Table

HALF = (torch.float16, torch.bfloat16)
Scalar = TypeVar("Scalar")
SVD = tuple[Float[Tensor, "*leading ldim k"], Float[Tensor, "*leading k"], Float[Tensor, "*leading rdim k"]]


@runtime_checkable
class TensorLike(Protocol):
    """What a factor needs for products: a tensor, or another object with these methods, such as one that wraps a tensor."""

    @property
    def ndim(self) -> int: ...

    @property
    def shape(self) -> torch.Size: ...

    def size(self, dim: int) -> int: ...

    def unsqueeze(self, dim: int) -> Any: ...

    def squeeze(self, dim: int) -> Any: ...

    def broadcast_to(self, size: tuple[int, ...]) -> Any: ...

    def __matmul__(self, other: Tensor) -> Any: ...


class FactoredMatrix(NotebookRepr):
    """The matrix `A @ B`, stored as its factors; only `AB` computes the product.

    Leading dimensions of the factors broadcast. The factors are real; in float16 and bfloat16 decompositions are computed
    in float32 and rounded back. Products need no more of a factor, or of the other operand, than `TensorLike` has.

    Example:
        >>> import torch
        >>> head = FactoredMatrix(
        ...     torch.randn(12, 64, 4), torch.randn(12, 4, 64)
        ... )  # 12 matrices [64, 64] of rank 4
        >>> head.shape, head.mdim
        (torch.Size([12, 64, 64]), 4)
        >>> head.S.shape, head.eigenvalues.shape
        (torch.Size([12, 4]), torch.Size([12, 4]))
        >>> U, S, V = head.svd()
        >>> torch.allclose(U * S[..., None, :] @ V.mT, head.AB, atol=1e-3)
        True
        >>> (torch.randn(50, 64) @ head @ head.T)[3, :10]
        FactoredMatrix([10, 64], mdim=4)

    Raises:
        ArgumentError: for incompatible shapes; a ValueError.
        IndexError: for an index out of range, or too many indices.
    """

    __array_ufunc__ = None  # lets `numpy_scalar * matrix` reach __rmul__

    A: Tensor  # or another `TensorLike`
    B: Tensor

    def __init__(self, A: TensorLike, B: TensorLike):
        if A.ndim < 2 or B.ndim < 2 or A.shape[-1] != B.shape[-2]:
            raise ArgumentError(
                f"the factors are A [..., ldim, mdim] and B [..., mdim, rdim] with one mdim, "
                f"got A {list(A.shape)} and B {list(B.shape)}"
            )
        try:
            leading = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        except RuntimeError:
            raise ArgumentError(
                f"the leading dimensions of A {list(A.shape)} and B {list(B.shape)} mismatch: they do not broadcast"
            ) from None
        self.A = A.broadcast_to((*leading, *A.shape[-2:]))
        self.B = B.broadcast_to((*leading, *B.shape[-2:]))
        self._known_svd: tuple[list[object], SVD] | None = None

    @property
    def ldim(self) -> int:
        """Rows."""
        return self.A.shape[-2]

    @property
    def mdim(self) -> int:
        """The dimension between the factors, which bounds the rank."""
        return self.A.shape[-1]

    @property
    def rdim(self) -> int:
        """Columns."""
        return self.B.shape[-1]

    @property
    def shape(self) -> torch.Size:
        """The shape of the product, `[*leading, ldim, rdim]`."""
        return self.A.shape[:-1] + self.B.shape[-1:]

    @property
    def ndim(self) -> int:
        """The number of dimensions of the product."""
        return self.A.ndim

    @property
    def has_leading_dims(self) -> bool:
        """Whether this is a stack of matrices."""
        return self.ndim > 2

    @property
    def pair(self) -> tuple[Float[Tensor, "*leading ldim mdim"], Float[Tensor, "*leading mdim rdim"]]:
        """The factors, `(A, B)`."""
        return self.A, self.B

    @property
    def AB(self) -> Float[Tensor, "*leading ldim rdim"]:
        """The product as a tensor of shape `shape`."""
        return self.A @ self.B

    @property
    def BA(self) -> Float[Tensor, "*leading mdim mdim"]:
        """The product `B @ A` of a square matrix: small, with the same nonzero eigenvalues as `AB`."""
        if self.ldim != self.rdim:
            raise ArgumentError(f"BA needs a square matrix, ldim equal to rdim; this one is {list(self.shape)}")
        return self.B @ self.A

    @property
    def T(self) -> "FactoredMatrix":
        """The transpose of the last two dimensions."""
        return FactoredMatrix(self.B.mT, self.A.mT)

    @overload
    def __matmul__(self, other: "FactoredMatrix") -> "FactoredMatrix": ...
    @overload
    def __matmul__(self, other: Tensor) -> "FactoredMatrix | Tensor": ...
    @overload
    def __matmul__(self, other: TensorLike) -> Any: ...
    def __matmul__(self, other: object) -> Any:
        """The product with a matrix or `FactoredMatrix` is a `FactoredMatrix`, with a vector [rdim] a tensor [..., ldim]."""
        if not isinstance(other, (FactoredMatrix, TensorLike)):
            return NotImplemented
        _check_fit(self.shape, other.shape)
        if isinstance(other, FactoredMatrix):
            return self._times(other.A)._times(other.B)
        if other.ndim == 1:
            return (self.A @ (self.B @ other.unsqueeze(-1))).squeeze(-1)
        return self._times(other)

    def _times(self, other: TensorLike) -> "FactoredMatrix":
        if self.rdim < self.mdim:  # then the product is no larger than A
            return FactoredMatrix(self.A @ self.B, other)
        return FactoredMatrix(self.A, self.B @ other)  # type: ignore[operator]

    @overload
    def __rmatmul__(self, other: Tensor) -> "FactoredMatrix | Tensor": ...
    @overload
    def __rmatmul__(self, other: TensorLike) -> Any: ...
    def __rmatmul__(self, other: object) -> Any:
        """The product with a matrix on the left is a `FactoredMatrix`, with a vector [ldim] a tensor [..., rdim]."""
        if not isinstance(other, TensorLike):
            return NotImplemented
        _check_fit(other.shape, self.shape)
        if other.ndim == 1:
            return (other.unsqueeze(-2) @ self.A @ self.B).squeeze(-2)
        if self.ldim < self.mdim:  # then the product is no larger than B
            return FactoredMatrix(other, self.A @ self.B)
        return FactoredMatrix(other @ self.A, self.B)

    def __mul__(self, scalar: Any) -> "FactoredMatrix":
        """The product with a number, or with a tensor of one element, whose axes broadcast."""
        return FactoredMatrix(self.A * _checked_scalar(scalar), self.B)

    __rmul__ = __mul__

    def __truediv__(self, scalar: Any) -> "FactoredMatrix":
        """The quotient by a number, or by a tensor of one element."""
        return FactoredMatrix(self.A / _checked_scalar(scalar), self.B)

    def __neg__(self) -> "FactoredMatrix":
        return FactoredMatrix(-self.A, self.B)

    def svd(self) -> SVD:
        """`(U, S, V)` such that the matrix is `U @ diag(S) @ V.mT`: U [..., ldim, k], S [..., k] descending, V [..., rdim, k].

        The third is V, right singular vectors in its *columns*, and not its transpose as `torch.linalg.svd` returns.
        Computed from a QR of each factor and the SVD of the small matrix between. The result is cached until a
        factor changes, unless it carries gradients.
        """
        if torch.is_grad_enabled() and (self.A.requires_grad or self.B.requires_grad):
            return self._computed_svd()
        if self._known_svd is None or self._known_svd[0] != _versions(*self.pair, *self._known_svd[1]):
            result = self._computed_svd()
            self._known_svd = (_versions(*self.pair, *result), result)
        return self._known_svd[1]

    def _computed_svd(self) -> SVD:
        Q_left, core, Q_right = self._core()
        U, S, Vh = torch.linalg.svd(core, full_matrices=False)
        return (Q_left @ U).to(self.A.dtype), S.to(self.A.dtype), (Q_right @ Vh.mT).to(self.A.dtype)

    def _core(self) -> tuple[Tensor, Tensor, Tensor]:
        """`(Q_left, core, Q_right)`: the matrix is `Q_left @ core @ Q_right.mT`, the Qs have orthonormal columns."""
        Q_left, R_left = torch.linalg.qr(_at_least_float32(self.A))
        Q_right, R_right = torch.linalg.qr(_at_least_float32(self.B).mT)
        return Q_left, R_left @ R_right.mT, Q_right

    @property
    def U(self) -> Float[Tensor, "*leading ldim k"]:
        """Left singular vectors, in the columns."""
        return self.svd()[0]

    @property
    def S(self) -> Float[Tensor, "*leading k"]:
        """Singular values, in descending order."""
        return self.svd()[1]

    @property
    def V(self) -> Float[Tensor, "*leading rdim k"]:
        """Right singular vectors, in the columns: the matrix is `U @ diag(S) @ V.mT`."""
        return self.svd()[2]

    @property
    def Vh(self) -> Float[Tensor, "*leading rdim k"]:
        """An alias of `V` for existing notebooks: singular vectors in columns, *not* transposed."""
        return self.V

    @property
    def eigenvalues(self) -> Complex[Tensor, "*leading mdim"]:
        """The eigenvalues of `BA`, for a square matrix: the nonzero eigenvalues of `AB`, padded with zeros."""
        if self.A.dtype in HALF:
            return FactoredMatrix(self.A.float(), self.B.float()).eigenvalues
        return torch.linalg.eigvals(self.BA)

    def norm(self) -> Float[Tensor, "*leading"]:
        """The Frobenius norm, the root of the sum of the squared singular values."""
        return torch.linalg.matrix_norm(self._core()[1]).to(self.A.dtype)

    def make_even(self) -> "FactoredMatrix":
        """The same matrix with the factors `U sqrt(S)` and `sqrt(S) V.mT`, which have equal singular values."""
        U, S, V = self.svd()
        root = S.sqrt()
        return FactoredMatrix(U * root[..., None, :], root[..., :, None] * V.mT)

    def collapse_l(self) -> Float[Tensor, "*leading k rdim"]:
        """`diag(S) @ V.mT`: the matrix up to a rotation of what it puts out on the left, with the same norms."""
        _, S, V = self.svd()
        return S[..., :, None] * V.mT

    def collapse_r(self) -> Float[Tensor, "*leading ldim k"]:
        """`U @ diag(S)`: the matrix up to a rotation on the right, with the same norms."""
        U, S, _ = self.svd()
        return U * S[..., None, :]

    def get_corner(self, k: int = 3) -> Tensor:
        """The first `k` entries of the product along every dimension, for inspection."""
        return self[(slice(k),) * self.ndim].AB

    def unsqueeze(self, k: int) -> "FactoredMatrix":
        """A new leading dimension of size one before dimension `k`; a negative `k` counts from the end."""
        place = k if k >= 0 else k + self.ndim + 1
        if not 0 <= place <= self.ndim - 2:
            raise IndexError(
                f"unsqueeze({k}) of matrix {list(self.shape)}: a leading dimension can go to 0 .. {self.ndim - 2}, "
                "before the last two"
            )
        return FactoredMatrix(self.A.unsqueeze(place), self.B.unsqueeze(place))

    def __getitem__(self, index: Any) -> "FactoredMatrix":
        """Any index on leading dimensions; slices, integers, lists or masks on the last two.

        The last two are indexed each for itself, and stay: an integer leaves a dimension of size one.
        """
        leading, rows, columns = self._split_index(index)
        A, B = self.A[leading], self.B[leading]
        return FactoredMatrix(A[..., rows, :], B[..., columns])

    def _split_index(self, index: Any) -> tuple[tuple[Any, ...], Any, Any]:
        """Splits an index into those of the leading dimensions, the rows and the columns; expands an ellipsis."""
        items = list(index) if isinstance(index, tuple) else [index]
        missing = self.ndim - sum(map(_dims_used, items))
        if missing < 0:
            raise IndexError(
                f"too many indices for matrix {list(self.shape)}: {self.ndim} dimensions, {-missing} more given"
            )
        ellipses = [i for i, item in enumerate(items) if item is Ellipsis]
        if len(ellipses) > 1:
            raise IndexError("an index can have one ellipsis ('...') only")
        at = ellipses[0] if ellipses else len(items)
        items[at : at + 1] = [slice(None)] * missing
        *leading, rows, columns = items
        if sum(map(_dims_used, leading)) != self.ndim - 2:
            raise IndexError(f"new dimensions and masks of matrix {list(self.shape)} go before its last two dimensions")
        return tuple(leading), _keeping(rows, self.ldim, "row"), _keeping(columns, self.rdim, "column")

    def repr_table(self) -> Table:
        """The factors, with their shapes, dtypes and devices."""
        return Table(
            ("factor", "shape", "dtype", "device"), [(n, [*x.shape], x.dtype, x.device) for n, x in self._factors()]
        )

    def _factors(self) -> list[tuple[str, Tensor]]:
        return [("A", self.A), ("B", self.B)]

    def __repr__(self) -> str:
        return f"FactoredMatrix({list(self.shape)}, mdim={self.mdim})"


def _dims_used(item: object) -> int:
    """The number of dimensions that an item of an index consumes."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.ndim
    return 1


def _keeping(item: Any, size: int, what: str) -> Any:
    """An integer as a slice of length one; anything else unchanged."""
    try:
        place = operator.index(item)
    except TypeError:
        return item
    if not -size <= place < size:
        raise IndexError(f"{what} {place} is out of range: there are {size}, so {-size} to {size - 1}")
    return slice(place % size, place % size + 1)


def _checked_scalar(scalar: Scalar) -> Scalar:
    if isinstance(scalar, Tensor) and scalar.numel() != 1:
        raise ArgumentError(
            f"a matrix is scaled by a tensor of one element, got shape {list(scalar.shape)}; products are @"
        )
    return scalar


def _check_fit(left: torch.Size, right: torch.Size) -> None:
    """Raises ArgumentError if matrices of these shapes cannot be multiplied; one of them may be a vector."""
    if not left or not right or left[-1] != right[0 if len(right) == 1 else -2]:
        raise ArgumentError(f"{list(left)} @ {list(right)}: the inner dimensions of a product have to be equal")
    try:
        torch.broadcast_shapes(left[:-2], right[:-2])
    except RuntimeError:
        raise ArgumentError(f"{list(left)} @ {list(right)}: the leading dimensions do not broadcast") from None


def _versions(*tensors: Tensor) -> list[object]:
    """What every edit in place changes, of a tensor or a view of it; inference tensors cannot tell, so never equal."""
    return [object() if x.is_inference() else x._version for x in tensors]


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x
