"""One comparison of tensors for the whole suite.

Rounding errors grow with the size of the values, the precision of the dtype and the number of operations in sequence. So the
largest allowed difference is

    ROUNDING * eps(dtype) * depth * size

where `eps` is that of the coarser dtype of the two, `size` is the largest finite magnitude that is compared (or `scale`, the
magnitude of the terms, where large terms cancel), and `depth` is the number of layers, of any kind, that the computation
passes through one after the other. Exactly equal values are compared with `torch.equal`, not here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROUNDING = 16  # one layer: a sum of 100 products, each rounded, errs by about sqrt(100) eps; the rest is margin
MODEL = 8  # the depth of a forward pass through the small models of this suite
GRADIENT = 4 * MODEL  # forward and back again, through both factors of each product


def tolerance(actual: Tensor, expected: Tensor, depth: float = MODEL, scale: float | Tensor | None = None) -> float:
    """The largest difference that rounding explains."""
    dtypes = [x.dtype for x in (actual, expected) if x.is_floating_point()]
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    return ROUNDING * eps * depth * max(_size(actual), _size(expected), _size(torch.as_tensor(scale or 0.0)))


def assert_close(
    actual: Any,
    expected: Any,
    depth: float = MODEL,
    scale: float | Tensor | None = None,
    msg: str | Callable[[str], str] | None = None,
) -> None:
    """Raises AssertionError if two tensors differ by more than rounding explains, or in shape; dtypes may differ."""
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    atol = tolerance(actual, expected, depth, scale)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, equal_nan=True, check_dtype=False, msg=msg)


def _size(x: Tensor) -> float:
    finite = x.detach()[x.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
