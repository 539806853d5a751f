"""Weights in 8-bit floating point, which are numbers only together with scales that are stored beside them."""

from collections.abc import Iterable

import torch


def float8_problem(dtypes: Iterable[tuple[str, torch.dtype]]) -> str | None:
    """What is wrong with tensors, given as (name, dtype), of which some are floating point numbers of 8 bits or fewer; or None.

    >>> float8_problem([("a", torch.float32), ("b", torch.float8_e4m3fn)])
    "'b' is torch.float8_e4m3fn, whose scales cannot be read: load the original weights, or those that transformers dequantises"
    """
    found = [(name, dtype) for name, dtype in dtypes if dtype.is_floating_point and dtype.itemsize == 1]
    if not found:
        return None
    name, dtype = found[0]
    more = f" (and {len(found) - 1} more tensors)" if len(found) > 1 else ""
    return (
        f"{name!r}{more} is {dtype}, whose scales cannot be read: load the original weights, or those that transformers "
        "dequantises"
    )
