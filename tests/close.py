"""One comparison of numbers for the whole suite.

Every operation rounds its result to `eps` of its dtype, relative to the size of what it adds up. Rounding errors of both signs
partly cancel: a sum of n products errs by about sqrt(n) * eps times the largest term (Higham and Mary, "A new approach to
probabilistic rounding error analysis", 2019), in an order of summation that differs from processor to processor. Layers that
follow each other add their errors. So the largest difference that rounding explains is

    ROUNDING * depth * eps(dtype) * size

where `eps` is that of the coarser dtype of the two; `size` is the largest magnitude that is compared, or `scale`, the magnitude
of the terms, where large terms cancel; and `depth` is the number of layers, of any kind, that the computation passes through one
after the other. In half precision sums are kept in float32 and only the few results of a layer are rounded: HALF instead of
ROUNDING. For a model in float32 the bound is 1.5e-5 of the largest logit, and 6e-5 of the largest gradient: a wrong weight, mask,
position or constant is 100 times that. Nothing here is tuned to a test: what needs another tolerance compares something else
than two roundings of one number, and says what (`assert_near`).

Values that must be equal to the bit are compared with `torch.equal`, or with `assert_equal` where NaN is among them.
"""

from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROUNDING = 16  # one layer: sqrt(n) for the longest sums of this suite, n = 256
HALF = 2  # the same in half precision, where sums are kept in float32: four results of a layer
LAYER = 1  # the depth of one operation, or of a component
MODEL = 8  # the depth of a forward pass through the small models of this suite
GRADIENT = 4 * MODEL  # forward and back again, through both factors of each product
APART = 100  # what differs, differs by this many times more than rounding explains


def assert_close(
    actual: Any,
    expected: Any,
    depth: float = MODEL,
    scale: float | Tensor | None = None,
    msg: str | Callable[[str], str] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Raises AssertionError if two values differ by more than rounding explains.

    Tensors must agree in shape and dtype; where `dtype` names the precision of the computation, they may have others, as a
    reference in float64 has. Numbers, arrays and lists of numbers have the precision of the tensor that they are compared with,
    else float32; one expected number stands for a tensor full of it. Lists and dictionaries of tensors are compared item by
    item, a pattern with the scale of its scores if these are there, and None is None. NaN equals NaN where anything else is a
    number. `msg` goes before the message.
    """
    if isinstance(expected, Mapping) or _is_list_of_tensors(expected):
        for name, one, other, scores in _items(actual, expected, msg):
            assert_close(one, other, depth, scores if scale is None else scale, name, dtype=dtype)
        return
    if actual is None or expected is None:
        assert actual is expected, _said(msg, "one of the two is None")
        return
    if dtype is None and isinstance(actual, Tensor) and isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype, _said(msg, f"dtype {actual.dtype}, expected {expected.dtype}")
    atol = tolerance(actual, expected, depth, scale, dtype)
    one, other = _tensor(actual), _tensor(expected)
    other = other.expand(one.shape) if isinstance(expected, Number) else other
    torch.testing.assert_close(
        one, other, rtol=0, atol=atol, equal_nan=True, check_dtype=False, msg=lambda text: _said(msg, text)
    )
    assert not one.numel() or not one.isnan().all(), _said(msg, "every value is NaN: nothing was compared")


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Raises AssertionError unless two tensors are equal to the bit, NaN where NaN is expected."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_near(actual: Any, expected: Any, within: float, because: str) -> None:
    """Raises AssertionError if two values differ by more than `within` of the largest expected magnitude.

    For what differs by more than rounding, as estimates and approximations do; `because` says why, and why so much.
    """
    one, other = _tensor(actual).double(), _tensor(expected).double()
    other = other.expand(one.shape) if isinstance(expected, Number) else other
    torch.testing.assert_close(one, other, rtol=0, atol=within * _size(other), msg=lambda text: _said(because, text))


def assert_apart(actual: Any, expected: Any, msg: str | None = None, times: float = APART) -> None:
    """Raises AssertionError unless some difference is `times` what rounding in a model explains: a negative control."""
    one, other = _tensor(actual), _tensor(expected)
    assert one.shape == other.shape, _said(msg, f"shapes {tuple(one.shape)} and {tuple(other.shape)}")
    assert not is_close(actual, expected, MODEL * times), _said(msg, f"no difference is {times} times that of rounding")


def is_close(actual: Any, expected: Any, depth: float = MODEL, scale: float | Tensor | None = None) -> bool:
    """Whether two values have one shape and differ by no more than rounding explains."""
    one, other = _tensor(actual), _tensor(expected)
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=0, atol=tolerance(actual, expected, depth, scale), equal_nan=True
    )


def tolerance(
    actual: Any, expected: Any, depth: float = MODEL, scale: Any = None, dtype: torch.dtype | None = None
) -> float:
    """The largest difference that rounding explains."""
    values = [actual, expected] if scale is None else [actual, expected, scale]
    return depth * _rounding(actual, expected, dtype) * max(_size(x) for x in values)


def _rounding(actual: Any, expected: Any, dtype: torch.dtype | None) -> float:
    """What one layer rounds, in the coarser dtype of two tensors; zero, if there is nothing but integers."""
    tensors = [x for x in (actual, expected) if isinstance(x, Tensor)]
    known = [dtype] if dtype else [x.dtype for x in tensors if x.is_floating_point() or x.is_complex()]
    if not known and len(tensors) < 2 and any(_tensor(x).is_floating_point() for x in (actual, expected)):
        known = [torch.float32]
    return max((torch.finfo(each).eps * (ROUNDING if each.itemsize > 2 else HALF) for each in known), default=0.0)


def _size(x: Any) -> float:
    """The largest magnitude, infinities and the largest number of a dtype (which masks use in their place) left out."""
    magnitude = _tensor(x).abs()
    limit = torch.finfo(x.dtype).max / 2 if isinstance(x, Tensor) and x.is_floating_point() else float("inf")
    finite = magnitude[magnitude.isfinite() & (magnitude < limit)]
    return float(finite.max()) if finite.numel() else 0.0


def _tensor(x: Any) -> Tensor:
    """As a tensor on the CPU, of the finest dtype of its kind, so that nothing more is rounded here."""
    x = x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x.long()


def _is_list_of_tensors(x: Any) -> bool:
    return isinstance(x, list | tuple) and any(
        item is None or isinstance(item, Tensor | list | tuple | Mapping) for item in x
    )


def _items(actual: Any, expected: Any, msg: Any) -> Iterator[tuple[str, Any, Any, float | None]]:
    """Each item's name, both values and scale: a pattern errs by up to half of what its scores err by."""
    keys = list(expected) if isinstance(expected, Mapping) else range(len(expected))
    found = list(actual) if isinstance(expected, Mapping) else range(len(actual))
    assert list(found) == list(keys), _said(msg, f"has {list(found)}, expected {list(keys)}")
    for key in keys:
        scores = str(key).removesuffix("hook_pattern") + "hook_attn_scores"
        scale = _size(expected[scores]) / 2 if scores in keys else None
        yield _said(msg, f"item {key!r}"), actual[key], expected[key], scale


def _said(msg: str | Callable[[str], str] | None, text: str) -> str:
    return msg(text) if callable(msg) else f"{msg}: {text}" if msg else text
