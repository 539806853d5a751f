"""A factored matrix does what its dense product does, from the factors alone."""

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hooked_lm.factored_matrix import FactoredMatrix
from tests.close import GRADIENT, assert_close

DIM = st.integers(1, 6)
LEADING = st.sampled_from(  # of A, of B
    [((), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((3,), ()), ((), (2, 3)), ((2, 1), (1, 3)), ((1,), (4,)), ((0,), (0,))]
)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@st.composite
def matrices(draw: st.DrawFn, square: bool = False, leading: Any = LEADING) -> FactoredMatrix:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    ldim, mdim, rdim = draw(DIM), draw(DIM), draw(DIM)
    of_a, of_b = draw(leading)
    return FactoredMatrix(random(*of_a, ldim, mdim), random(*of_b, mdim, ldim if square else rdim))


@pytest.fixture
def stack() -> FactoredMatrix:
    return FactoredMatrix(random(2, 3, 8, 4), random(2, 3, 4, 6))


class TestShape:
    @given(matrices())
    def test_names_of_dimensions(self, matrix: FactoredMatrix) -> None:
        assert matrix.shape == matrix.AB.shape
        assert matrix.ndim == len(matrix.shape) == matrix.AB.ndim
        assert (matrix.ldim, matrix.rdim) == tuple(matrix.shape[-2:])
        assert matrix.mdim == matrix.A.shape[-1] == matrix.B.shape[-2]
        assert matrix.has_leading_dims == (matrix.ndim > 2)
        assert all(mine is given for mine, given in zip(matrix.pair, (matrix.A, matrix.B), strict=True))
        assert matrix.A.shape[:-2] == matrix.B.shape[:-2] == matrix.shape[:-2]

    def test_broadcast_factors_share_memory_with_what_was_given(self) -> None:
        A = random(8, 4)
        assert FactoredMatrix(A, random(100, 4, 8)).A.untyped_storage().data_ptr() == A.untyped_storage().data_ptr()

    def test_repr(self, stack: FactoredMatrix) -> None:
        assert repr(stack) == str(stack) == "FactoredMatrix([2, 3, 8, 6], mdim=4)"

    @pytest.mark.parametrize(("a", "b"), [((3, 4), (5, 3)), ((4,), (4, 3)), ((3, 4), (4,)), ((2, 3, 4), (3, 4, 5))])
    def test_factors_that_do_not_fit_are_named(self, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"A .*B ") as error:
            FactoredMatrix(random(*a), random(*b))
        assert str(list(a)) in str(error.value)
        assert str(list(b)) in str(error.value)


class TestProducts:
    @given(matrices(), st.data())
    def test_with_a_matrix_or_a_stack_of_them(self, matrix: FactoredMatrix, data: st.DataObject) -> None:
        n = data.draw(DIM)
        leading = data.draw(st.sampled_from([(), matrix.shape[:-2], (2, *matrix.shape[:-2])]))
        right, left = random(*leading, matrix.rdim, n), random(*leading, n, matrix.ldim)
        for product, expected, inner in (
            (matrix @ right, matrix.AB @ right, min(matrix.mdim, matrix.rdim)),
            (left @ matrix, left @ matrix.AB, min(matrix.mdim, matrix.ldim)),
        ):
            assert isinstance(product, FactoredMatrix)
            assert product.mdim == inner
            assert_close(product.AB, expected)

    @given(matrices())
    def test_with_a_vector(self, matrix: FactoredMatrix) -> None:
        right, left = random(matrix.rdim), random(matrix.ldim)
        assert_close(matrix @ right, matrix.AB @ right)
        assert_close(left @ matrix, left @ matrix.AB)
        assert_close(torch.nn.Parameter(left) @ matrix, left @ matrix.AB)

    @given(matrices(), DIM, DIM)
    def test_with_a_factored_matrix(self, matrix: FactoredMatrix, mdim: int, rdim: int) -> None:
        other = FactoredMatrix(random(matrix.rdim, mdim), random(mdim, rdim))
        product = matrix @ other
        assert isinstance(product, FactoredMatrix)
        assert product.mdim == min(matrix.mdim, matrix.rdim, mdim)
        assert_close(product.AB, matrix.AB @ other.AB)

    @pytest.mark.parametrize("scalar", [2, -0.5, np.float64(3), torch.tensor(2.0), torch.full((1, 1, 1), 2.0)])
    def test_with_a_number(self, stack: FactoredMatrix, scalar: Any) -> None:
        number = float(scalar)
        for product, expected in (
            (stack * scalar, stack.AB * number),
            (scalar * stack, stack.AB * number),
            (stack / scalar, stack.AB / number),
            (-stack, -stack.AB),
        ):
            assert isinstance(product, FactoredMatrix)
            assert product.shape == stack.shape
            assert_close(product.AB, expected)

    def test_shapes_that_do_not_fit_are_named(self, stack: FactoredMatrix) -> None:
        def message(left: Any, right: Any, what: str) -> str:
            return re.escape(f"{list(left.shape)} @ {list(right.shape)}: the {what} dimensions")

        for right in (random(5, 7), random(5), torch.tensor(1.0), stack[0, 0]):
            with pytest.raises(ValueError, match=message(stack, right, "inner")):
                stack @ right
        for left in (random(7, 5), random(5), torch.tensor(1.0)):
            with pytest.raises(ValueError, match=message(left, stack, "inner")):
                left @ stack
        right, left = random(4, 6, 2), random(4, 2, 8)
        with pytest.raises(ValueError, match=message(stack, right, "leading")):
            stack @ right
        with pytest.raises(ValueError, match=message(left, stack, "leading")):
            left @ stack
        with pytest.raises(ValueError, match=r"one element, got shape \[3\]; products are @"):
            stack * torch.ones(3)

    @pytest.mark.parametrize("kind", [ValueError, AssertionError, RuntimeError])
    def test_misfits_are_caught_by_the_names_that_others_give_them(self, stack: FactoredMatrix, kind: type) -> None:
        row = FactoredMatrix(random(2, 3), random(3, 5))
        for misfit in (
            lambda: stack @ random(5, 7),
            lambda: random(7, 5) @ stack,
            lambda: stack @ random(4, 6, 2),
            lambda: stack * torch.ones(3),
            lambda: row.BA,
            lambda: FactoredMatrix(random(2, 3), random(2, 3)),
        ):
            with pytest.raises(kind):
                misfit()

    def test_a_number_with_axes_broadcasts(self) -> None:
        one = FactoredMatrix(random(8, 3), random(3, 6))
        for product in (one * torch.full((1, 1, 1), 2.0), torch.full((1, 1, 1), 2.0) * one):
            assert product.shape == (1, 8, 6)
            assert_close(product.AB, 2 * one.AB[None])

    def test_other_things_are_refused(self, stack: FactoredMatrix) -> None:
        for product in (lambda: stack @ "x", lambda: "x" @ stack, lambda: stack * "x"):
            with pytest.raises(TypeError):
                product()


class TestDecompositions:
    @given(matrices())
    def test_svd(self, matrix: FactoredMatrix) -> None:
        U, S, V = matrix.svd()
        k = min(matrix.ldim, matrix.mdim, matrix.rdim)
        leading = matrix.shape[:-2]
        assert U.shape == (*leading, matrix.ldim, k)
        assert S.shape == (*leading, k)
        assert V.shape == (*leading, matrix.rdim, k)
        assert_close((U * S[..., None, :]) @ V.mT, matrix.AB)
        assert_close(U.mT @ U, torch.eye(k, dtype=U.dtype).expand(*leading, k, k))
        assert_close(V.mT @ V, torch.eye(k, dtype=U.dtype).expand(*leading, k, k))
        assert_close(S, torch.linalg.svdvals(matrix.AB)[..., :k])

    @given(matrices())
    def test_its_parts_belong_together(self, matrix: FactoredMatrix) -> None:
        assert_close(matrix.U * matrix.S[..., None, :] @ matrix.Vh.mT, matrix.AB)
        assert matrix.V is matrix.Vh is matrix.svd()[2]

    @given(matrices())
    def test_norm(self, matrix: FactoredMatrix) -> None:
        assert_close(matrix.norm(), torch.linalg.matrix_norm(matrix.AB))
        assert_close(matrix.norm(), matrix.S.square().sum(-1).sqrt())

    @given(matrices())
    def test_collapsing_keeps_gram_matrices(self, matrix: FactoredMatrix) -> None:
        left, right = matrix.collapse_l(), matrix.collapse_r()
        assert_close(left.mT @ left, matrix.AB.mT @ matrix.AB)
        assert_close(right @ right.mT, matrix.AB @ matrix.AB.mT)

    @given(matrices())
    def test_make_even(self, matrix: FactoredMatrix) -> None:
        even = matrix.make_even()
        assert_close(even.AB, matrix.AB)
        for factor in even.pair:
            assert_close(torch.linalg.svdvals(factor), matrix.S.sqrt())

    @given(matrices(square=True))
    def test_eigenvalues(self, matrix: FactoredMatrix) -> None:
        """Sets of eigenvalues are equal if the sums of all their powers are."""
        assert_close(matrix.BA, matrix.B @ matrix.A)
        mine, dense = matrix.eigenvalues, torch.linalg.eigvals(matrix.AB)
        assert mine.is_complex()
        assert mine.shape == (*matrix.shape[:-2], matrix.mdim)
        scale = 1 + dense.abs().amax(-1) if dense.numel() else 1
        norm = 1 + torch.linalg.matrix_norm(matrix.AB) if dense.numel() else torch.ones(1)
        for power in range(1, 7):  # rounding of an eigenvalue is relative to the matrix, not to the eigenvalue
            mine_sum, dense_sum = (mine**power).sum(-1), (dense**power).sum(-1)
            terms = matrix.mdim * (norm / scale) ** power
            assert_close(mine_sum / scale**power, dense_sum / scale**power, depth=GRADIENT, scale=terms)

    def test_known_eigenvalues(self) -> None:
        copying = FactoredMatrix(torch.tensor([[2.0], [1.0]]), torch.tensor([[3.0, -1.0]]))
        assert_close(copying.eigenvalues, torch.tensor([5.0 + 0j]))

    def test_only_a_square_matrix_has_eigenvalues(self, stack: FactoredMatrix) -> None:
        for look in (lambda: stack.BA, lambda: stack.eigenvalues):
            with pytest.raises(ValueError, match=r"square matrix.* \[2, 3, 8, 6\]"):
                look()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_goes_through_float32(self, dtype: torch.dtype) -> None:
        half = FactoredMatrix(torch.randn(8, 3).to(dtype), torch.randn(3, 8).to(dtype))
        full = FactoredMatrix(half.A.float(), half.B.float())
        assert {part.dtype for part in (*half.svd(), half.norm(), *half.make_even().pair)} == {dtype}
        assert torch.equal(half.S, full.S.to(dtype))
        assert_close(half.eigenvalues, full.eigenvalues)

    def test_a_rank_deficient_matrix(self) -> None:
        matrix = FactoredMatrix(random(5, 1).expand(5, 3), random(3, 6))
        assert_close(matrix.U * matrix.S[..., None, :] @ matrix.V.mT, matrix.AB)
        assert_close(matrix.S[1:], torch.zeros(2, dtype=torch.float64), scale=matrix.S)
        nothing = FactoredMatrix(torch.zeros(5, 3), torch.zeros(3, 6))
        assert nothing.norm() == 0
        assert_close(nothing.make_even().AB, torch.zeros(5, 6))


class TestKeptSVD:
    def test_it_is_computed_once(self, stack: FactoredMatrix) -> None:
        assert stack.U is stack.U
        assert stack.S is stack.svd()[1]

    @pytest.mark.parametrize("which", ["A", "B"])
    def test_an_edit_of_a_factor_is_seen(self, which: str) -> None:
        factors = {"A": random(8, 4), "B": random(4, 6)}
        matrix = FactoredMatrix(*factors.values())
        before = matrix.S
        factors[which].mul_(2)
        assert_close(matrix.S, before * 2)

    def test_an_edit_of_a_result_does_no_harm(self, stack: FactoredMatrix) -> None:
        expected = stack.S.clone()
        stack.S.zero_()
        assert_close(stack.S, expected)

    def test_an_edit_of_a_parameter_is_seen(self) -> None:
        weight = torch.nn.Parameter(random(8, 4))
        matrix = FactoredMatrix(weight, random(4, 6))
        with torch.no_grad():
            before = matrix.S
            weight.mul_(3)
            assert_close(matrix.S, before * 3)

    def test_inference_tensors_are_decomposed_anew(self) -> None:
        with torch.inference_mode():
            A = random(8, 4)
            matrix = FactoredMatrix(A, random(4, 6))
            before = matrix.S
            A.mul_(2)
            assert_close(matrix.S, before * 2)

    def test_what_was_kept_without_gradients_does_not_hide_them(self) -> None:
        matrix = FactoredMatrix(random(8, 4).requires_grad_(), random(4, 6))
        with torch.no_grad():
            assert not matrix.S.requires_grad
        assert matrix.S.requires_grad

    def test_it_can_be_copied(self, stack: FactoredMatrix) -> None:
        assert_close(copy.deepcopy(stack).S, stack.S)


LOOKS: dict[str, Callable[[FactoredMatrix], Tensor]] = {
    "AB": lambda m: m.AB.square().sum(),
    "norm": lambda m: m.norm().sum(),
    "S": lambda m: m.S.sum(),
    "make_even": lambda m: (m.make_even().AB ** 3).sum(),
    "products": lambda m: (torch.ones(5, 7, dtype=torch.float64) @ (2 * m) @ m.T).AB.square().sum(),
    "index": lambda m: m[..., 1, 1:].AB.square().sum(),
}
DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "AB": lambda m: m.square().sum(),
    "norm": lambda m: torch.linalg.matrix_norm(m).sum(),
    "S": lambda m: torch.linalg.svdvals(m).sum(),
    "make_even": lambda m: (m**3).sum(),
    "products": lambda m: (2 * torch.ones(5, 7, dtype=torch.float64) @ m @ m.mT).square().sum(),
    "index": lambda m: m[..., 1, 1:].square().sum(),
}


class TestGradients:
    @pytest.mark.parametrize("look", LOOKS)
    @pytest.mark.parametrize("mdim", [3, 9])
    def test_they_are_those_of_the_dense_product(self, look: str, mdim: int) -> None:
        A, B = random(2, 7, mdim).requires_grad_(), random(mdim, 4).requires_grad_()
        if look == "S" and mdim == 3:  # the dense product has a zero singular value more, where svdvals has a kink
            B = random(mdim, 3).requires_grad_()
        actual = torch.autograd.grad(LOOKS[look](FactoredMatrix(A, B)), (A, B))
        expected = torch.autograd.grad(DENSE[look](A @ B), (A, B))
        for mine, dense in zip(actual, expected, strict=True):
            assert_close(mine, dense)

    def test_two_losses_one_after_the_other(self) -> None:
        A = random(6, 3).requires_grad_()
        matrix = FactoredMatrix(A, random(3, 6))
        matrix.S.sum().backward()
        matrix.norm().backward()
        assert A.grad is not None
        assert A.grad.isfinite().all()


class TestIndexing:
    INDICES = (
        0,
        -1,
        (1, 2),
        slice(1, None),
        (slice(None), 0),
        (0, slice(0, 2)),
        None,
        (None, 0),
        (..., None, slice(None), slice(None)),
        (slice(None), None, 0),
        [1, 0],
        torch.tensor([1, 1, 0]),
        torch.tensor([True, False]),
        torch.tensor([[True, False, True], [False, False, True]]),
        (torch.tensor([0, 1]), torch.tensor([2, 0])),
        (..., slice(1, 4), slice(None, None, 2)),
        (0, 0, slice(2), slice(1, 2)),
        (0, ..., slice(3)),
        (..., [5, 0], slice(None)),
        (..., torch.tensor([1, 2])),
        (1, 1, [0, 7, 2]),
        (),
        ...,
    )

    @pytest.mark.parametrize("index", INDICES, ids=repr)
    def test_it_is_the_dense_product_indexed(self, stack: FactoredMatrix, index: Any) -> None:
        part = stack[index]
        assert isinstance(part, FactoredMatrix)
        assert part.mdim == stack.mdim
        assert torch.equal(part.A @ part.B, part.AB)
        assert_close(part.AB, stack.AB[index])

    @pytest.mark.parametrize(
        ("index", "dense"),
        [
            ((0, 0, 3), (0, 0, slice(3, 4))),
            ((0, 0, -1), (0, 0, slice(7, 8))),
            ((0, 0, 2, -1), (0, 0, slice(2, 3), slice(5, 6))),
            ((..., 4), (..., slice(4, 5))),
            ((..., np.int64(4)), (..., slice(4, 5))),
            ((..., torch.tensor(4), slice(None)), (..., slice(4, 5), slice(None))),
        ],
        ids=repr,
    )
    def test_an_integer_row_or_column_stays_a_dimension(self, stack: FactoredMatrix, index: Any, dense: Any) -> None:
        assert_close(stack[index].AB, stack.AB[dense])

    def test_lists_of_rows_and_columns_are_taken_each_for_itself(self, stack: FactoredMatrix) -> None:
        assert_close(stack[..., [0, 2, 5], [1, 3]].AB, stack.AB[..., [0, 2, 5], :][..., [1, 3]])
        keep = torch.arange(8) % 2 == 0
        assert_close(stack[:, :, keep, 0].AB, stack.AB[:, :, keep, :1])

    @pytest.mark.parametrize("index", [(0,) * 5, (..., 0, 0, 0, 0, 0), (torch.ones(2, 3, dtype=torch.bool), 0, 0, 0)])
    def test_too_many(self, stack: FactoredMatrix, index: Any) -> None:
        with pytest.raises(IndexError, match=r"too many indices for matrix \[2, 3, 8, 6\]"):
            stack[index]

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            (2, "index 2 is out of bounds"),
            ((..., 8, 0), "row 8 is out of range: there are 8, so -8 to 7"),
            ((..., -7), "column -7 is out of range: there are 6, so -6 to 5"),
            ((..., 0, ...), "one ellipsis"),
            ((..., None, slice(None)), "before its last two dimensions"),
            ((..., None), "before its last two dimensions"),
            ((..., torch.ones(8, 6, dtype=torch.bool)), "before its last two dimensions"),
        ],
        ids=repr,
    )
    def test_what_cannot_be(self, stack: FactoredMatrix, index: Any, message: str) -> None:
        with pytest.raises(IndexError, match=message):
            stack[index]


class TestLooksAndLayout:
    @given(matrices())
    def test_transpose(self, matrix: FactoredMatrix) -> None:
        assert_close(matrix.T.AB, matrix.AB.mT)
        assert_close(matrix.T.T.AB, matrix.AB)

    @pytest.mark.parametrize("k", [1, 2, 3, 20])
    def test_corner(self, stack: FactoredMatrix, k: int) -> None:
        assert_close(stack.get_corner(k), stack.AB[:k, :k, :k, :k])

    def test_corner_of_three_by_default(self, stack: FactoredMatrix) -> None:
        assert_close(stack.get_corner(), stack.AB[:3, :3, :3, :3])

    @pytest.mark.parametrize("k", [0, 1, 2, -3, -4, -5])
    def test_unsqueeze(self, stack: FactoredMatrix, k: int) -> None:
        assert_close(stack.unsqueeze(k).AB, stack.AB.unsqueeze(k))

    @pytest.mark.parametrize("k", [3, 4, -1, -2, -6])
    def test_no_new_dimension_within_the_matrix(self, stack: FactoredMatrix, k: int) -> None:
        with pytest.raises(IndexError, match=r"a leading dimension can go to 0 \.\. 2"):
            stack.unsqueeze(k)

    def test_the_product_is_never_made_unasked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No result between is as large as the [2000, 2000] of the product."""
        largest = 0

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal largest
                out = func(*args, **(kwargs or {}))
                largest = max(
                    [largest, *(x.numel() for x in (out if isinstance(out, tuple) else [out]) if torch.is_tensor(x))]
                )
                return out

        A, B, tall = torch.randn(2000, 4), torch.randn(4, 2000), torch.randn(2000, 5)
        with Watch():
            matrix = FactoredMatrix(A, B)
            (2 * matrix @ matrix.T @ tall, matrix @ tall[:, 0], tall.mT @ matrix, tall[:, 0] @ matrix)
            (matrix.svd(), matrix.norm(), matrix.eigenvalues, matrix.BA, matrix.make_even(), matrix.collapse_l())
            (matrix[:1000, 3], matrix.unsqueeze(0), matrix.get_corner(), repr(matrix))
        assert 2000 * 4 <= largest < 2000 * 10
        with Watch():
            _ = matrix.AB
        assert largest == 2000 * 2000
