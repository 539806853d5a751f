"""The comparison of the suite itself: it accepts rounding, and refuses what is well below any mistake."""

import numpy as np
import pytest
import torch

from tests.close import (
    APART,
    GRADIENT,
    HALF,
    LAYER,
    MODEL,
    ROUNDING,
    assert_apart,
    assert_close,
    assert_equal,
    assert_near,
    is_close,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> torch.Tensor:
    return (size * torch.randn(shape, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("size", [1e-20, 1.0, 500.0, 1e20])
@pytest.mark.parametrize("n", [16, 256])
def test_sums_in_another_order_are_close(n: int, size: float):
    left, right = numbers(64, n, size=size), numbers(n, 64)
    order = torch.randperm(n)
    assert_close(left[:, order] @ right[order], left @ right, depth=LAYER)


@pytest.mark.parametrize("n", [16, 256])
def test_sums_in_lower_precision_are_as_close_to_the_exact_one_as_their_dtype_allows(n: int):
    for dtype in (torch.float32, torch.bfloat16):
        left, right = numbers(64, n, dtype=dtype), numbers(n, 64, dtype=dtype)
        assert_close(left @ right, left.double() @ right.double(), depth=LAYER, dtype=dtype)


def test_the_rounding_of_a_network_is_within_its_depth():
    layers = [numbers(64, 64) / 8 for _ in range(MODEL)]

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = numbers(32, 64).to(dtype).requires_grad_()
        weights = [layer.to(dtype).requires_grad_() for layer in layers]
        out = x
        for weight in weights:
            out = out + torch.tanh(out @ weight)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *weights])]

    (out, *gradients), (exact, *exact_gradients) = run(torch.float32), run(torch.float64)
    assert_close(out, exact, dtype=torch.float32)
    assert_close(gradients, exact_gradients, depth=GRADIENT, dtype=torch.float32)


def test_a_pattern_errs_by_half_of_what_its_scores_err_by():
    scores = numbers(64, 16, size=1e3)
    scores[:, 1] = scores[:, 0] + 0.1  # a tie, which rounding moves most
    rounded = scores + 1e3 * ROUNDING * torch.finfo(torch.float32).eps * torch.randn_like(scores).sign()
    found = {"hook_attn_scores": rounded, "hook_pattern": rounded.softmax(-1)}
    expected = {"hook_attn_scores": scores, "hook_pattern": scores.softmax(-1)}
    assert not is_close(found["hook_pattern"], expected["hook_pattern"])
    assert_close(found, expected)
    expected["hook_pattern"] = expected["hook_pattern"].roll(1, -1)
    with pytest.raises(AssertionError, match="item 'hook_pattern'"):
        assert_close(found, expected)


@pytest.mark.parametrize("depth", [LAYER, MODEL, GRADIENT])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_where_it_says(dtype: torch.dtype, depth: int):
    bound = (ROUNDING if dtype.itemsize > 2 else HALF) * depth * torch.finfo(dtype).eps * 4
    expected = torch.full((3, 5), -4.0, dtype=torch.float64)
    for factor, close in [(0.9, True), (1.1, False)]:
        actual = expected.clone()
        actual[1, 2] += factor * bound  # towards zero: the size stays 4
        if close:
            assert_close(actual, expected, depth, dtype=dtype)
        else:
            with pytest.raises(AssertionError):
                assert_close(actual, expected, depth, dtype=dtype)


@pytest.mark.parametrize("mistake", [1e-4, -1e-4])
def test_a_small_mistake_in_one_number_is_refused(mistake: float):
    expected = numbers(4, 8, 16, size=300)
    actual = expected.clone()
    actual[2, 3, 5] += mistake * expected.abs().max()
    with pytest.raises(AssertionError):
        assert_close(actual, expected, GRADIENT)
    with pytest.raises(AssertionError):
        assert_close(expected, expected * (1 + mistake), GRADIENT)


def test_the_message_names_the_largest_difference_its_place_and_the_bound():
    actual, expected = torch.tensor([[1.0, 2.0], [3.0, 4.5]]), torch.tensor([[1.0, 2.0], [3.5, 4.0]])
    actual[1, 1] = 5.0
    with pytest.raises(
        AssertionError, match=r"(?s)Greatest absolute difference: 1.0 at index \(1, 1\).*7.6.*e-05 allowed"
    ):
        assert_close(actual, expected)
    with pytest.raises(AssertionError, match=r"layer 3: .*not close"):
        assert_close(actual, expected, msg="layer 3")
    with pytest.raises(AssertionError, match=r"<.*not close"):
        assert_close(actual, expected, msg=lambda text: f"<{text}>")


def test_cancelled_terms_are_measured_by_their_size():
    left, right = torch.tensor([1e4 + 0.001]), torch.tensor([1e4])
    with pytest.raises(AssertionError):
        assert_close(left - right, torch.tensor([0.001]))
    assert_close(left - right, torch.tensor([0.001]), scale=left)
    assert_close(left - right, torch.tensor([0.001]), scale=1e4)
    with pytest.raises(AssertionError):
        assert_close(left - right, torch.tensor([0.5]), scale=left)


def test_whole_numbers_and_truth_values_are_equal_or_not():
    assert_close(torch.tensor([True, False]), torch.tensor([True, False]))
    assert_close(torch.tensor([2**40, 3]), torch.tensor([2**40, 3]))
    assert_close(7, 7)
    for one, other in [
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor(2**40), torch.tensor(2**40 + 1)),
        (7, 8),
    ]:
        with pytest.raises(AssertionError):
            assert_close(one, other)


def test_masks_stand_where_they_stood_and_do_not_count_as_size():
    for mask in (-torch.inf, torch.inf, torch.nan, torch.finfo(torch.float32).min):
        expected = torch.tensor([1.0, mask, 2.0])
        assert_close(expected.clone(), expected)
        for actual in (torch.tensor([1.001, mask, 2.0]), torch.tensor([mask, 1.0, 2.0]), torch.tensor([1.0, 5.0, 2.0])):
            with pytest.raises(AssertionError):
                assert_close(actual, expected)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]))


def test_nothing_but_nan_is_no_comparison():
    with pytest.raises(AssertionError, match="every value is NaN"):
        assert_close(torch.tensor([torch.nan]), torch.tensor([torch.nan]))


def test_shapes_must_agree_also_of_nothing():
    assert_close(torch.empty(0, 3), torch.empty(0, 3))
    assert_close(torch.tensor(1.0), torch.tensor(1.0))
    for one, other in [((0, 3), (0, 4)), ((), (1,)), ((2, 1), (1, 2)), ((3,), (1, 3))]:
        with pytest.raises(AssertionError):
            assert_close(torch.zeros(one), torch.zeros(other))


def test_dtypes_must_agree_unless_the_precision_is_named():
    third = torch.tensor([1 / 3, 1.0], dtype=torch.float64)
    for lower in DTYPES[1:]:
        with pytest.raises(AssertionError, match="dtype"):
            assert_close(third.to(lower), third)
        assert_close(third.to(lower), third, dtype=lower)
        assert_close(third, third.to(lower), dtype=lower)
    with pytest.raises(AssertionError):
        assert_close(third.float(), third * 1.001, dtype=torch.float32)


def test_numbers_have_the_precision_of_what_they_are_compared_with():
    assert_close(torch.tensor(1 / 3), 1 / 3)
    assert_close(1 / 3 + 1e-7, 1 / 3)
    assert_close([1 / 3, 1.0], np.array([1 / 3, 1.0], dtype=np.float32))
    assert_close(torch.tensor([[0.5, 0.5]]), 0.5)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor(1 / 3, dtype=torch.float64), 1 / 3 + 1e-7)
    for wrong in (0.3334, 0, np.array([0.3334])[0]):
        with pytest.raises(AssertionError):
            assert_close(1 / 3, wrong)
    with pytest.raises(AssertionError):
        assert_close([1.0, 2.0], [1.0, 2.0, 3.0])


def test_complex_numbers():
    expected = torch.randn(5, dtype=torch.complex64)
    assert_close(expected * (1 + 1e-6j), expected)
    with pytest.raises(AssertionError):
        assert_close(expected * (1 + 1e-3j), expected)


def test_lists_and_dictionaries_are_compared_item_by_item():
    a, b = torch.ones(2), torch.full((2,), 1e4)
    assert_close([a, b], (a.clone(), b.clone()))
    assert_close({"a": a, "b": [b]}, {"a": a.clone(), "b": [b.clone()]})
    with pytest.raises(
        AssertionError, match="item 'a': item 0"
    ):  # measured by its own size, not that of the other item
        assert_close({"a": [a], "b": b}, {"a": [a + 0.01], "b": b})
    assert_close([None, a], [None, a.clone()])
    assert_close(None, None)
    for wrong in ([None, None], [a, a], [None, None, a]):
        with pytest.raises(AssertionError):
            assert_close(wrong, [None, a])
    for wrong in ([a], [a, b, b]):
        with pytest.raises(AssertionError, match="expected"):
            assert_close(wrong, [a, b])
    with pytest.raises(AssertionError, match="expected"):
        assert_close({"a": a}, {"b": a})


def test_gradients_do_not_stand_in_the_way():
    x = torch.ones(2, requires_grad=True)
    assert_close(2 * x, x + x)


def test_the_same_question_without_raising():
    expected = numbers(4, 8)
    assert is_close(expected * (1 + 1e-7), expected)
    assert not is_close(expected * 1.001, expected)


def test_what_differs_must_differ_by_more_than_rounding():
    expected = numbers(4, 8)
    assert_apart(expected + 0.1, expected)
    for same in (expected, expected * (1 + 1e-5)):
        with pytest.raises(AssertionError, match=f"a mask: no difference is {APART} times"):
            assert_apart(same, expected, "a mask")
    with pytest.raises(AssertionError, match="shapes"):
        assert_apart(expected, expected[:1])


def test_equal_to_the_bit():
    expected = torch.tensor([1.0, torch.nan, -torch.inf])
    assert_equal(expected.clone(), expected)
    for wrong in (expected.nan_to_num(), expected + 1e-6, expected[:2], expected.double()):
        with pytest.raises(AssertionError):
            assert_equal(wrong, expected)


def test_estimates_are_as_near_as_they_say():
    assert_near(torch.tensor([10.0, 0.1]), [10.4, 0.0], within=0.05, because="an estimate")
    with pytest.raises(AssertionError, match=r"(?s)an estimate: .*0\.52.* allowed"):
        assert_near(torch.tensor([10.0, 0.1]), [10.4, 0.8], within=0.05, because="an estimate")
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(AssertionError):
            assert_near(torch.tensor([1.0, wrong]), torch.tensor([1.0, 1.0]), within=1.0, because="an estimate")
