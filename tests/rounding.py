"""The rounding of other processors: results that depend on shapes and strides, as those of every kernel do.

A kernel adds up in an order that depends on shapes, strides and the processor. It computes exponentials by one polynomial for the
elements that fill a register, and by another for the rest. So a row of a batch may differ in its last bits from the same row
alone; on which processor, nobody knows. Within `rounding`, it does on every one: what the kernels in `KERNELS` return is
multiplied by 1 + u * eps, where u is -1, 0 or 1, drawn for each element by the seed, the kernel, and the shapes, strides and
dtypes of its arguments. The same call returns the same bits; a call with another batch or slice returns others. In half precision
sums are kept in float32, so processors differ only where a sum is near the middle of two numbers: one element in twelve is moved
to its neighbour.

An element is disturbed only if the kernel rounds it, that is, if it differs from the result of the same kernel in float64. So
sums of whole numbers, one-hot products and masked positions stay exact. Kernels that move, compare, add or multiply element by
element round alike on every processor and are left alone. So are results in float64, which tests compare with.

The kernels are replaced in PyTorch's dispatcher, below gradients, `torch.func`, inference mode and autocast, and for tensors on
the CPU alone. Fake tensors and wrappers of tensors never reach them.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

KERNELS = re.compile(
    r"""(
      mm | addmm | _addmm_activation | bmm | baddbmm | addbmm | addmv | dot | vdot | addr
    | (convolution | _scaled_dot_product_flash_attention_for_cpu) (_backward)?
    | native_(layer|group|batch)_norm (_backward)? | norm | linalg_vector_norm
    | (_softmax | _log_softmax) (_backward_data)?
    | sum | mean | var | std | var_mean | std_mean | cumsum | nll_loss_forward | mse_loss
    | exp | exp2 | expm1 | log | log2 | log10 | log1p | logaddexp | logit | rsqrt | erf | erfc | erfinv
    | sin | cos | tan | sinh | cosh | atan | atan2
    | (tanh | sigmoid | log_sigmoid | gelu | silu | softplus | mish | elu) (_forward | _backward)?
    )_?(\..*)?""",
    re.VERBOSE,
)
BOUNDED = {"_softmax", "sigmoid", "tanh", "erf", "sin", "cos"}  # no kernel returns more than 1
LOW = {torch.float32, torch.bfloat16, torch.float16}
TABLE = 1 << 18
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@contextmanager
def rounding(seed: int) -> Iterator[None]:
    """Disturbs what the kernels for the CPU return, in every thread of the process."""
    factors = _Factors(seed)
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
            for operator in _operators():
                library.impl(operator, _Disturbed(operator, factors), "CPU")
        yield
    finally:
        library._destroy()


@contextmanager
def undisturbed() -> Iterator[None]:
    """The true kernels, within `rounding`: for what is compared with another process, which has them, or as the truth."""
    before, _Disturbed.is_paused = _Disturbed.is_paused, True
    try:
        yield
    finally:
        _Disturbed.is_paused = before


def _operators() -> list[str]:
    """The overloads of the kernels that have an implementation for the CPU, those in place and with `out` too."""
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [name for name in names if KERNELS.fullmatch(name) and _is_for_the_cpu(name)]


@cache
def _kernel(operator: str) -> Any:
    """The true kernel, also within `rounding`."""
    return torch.library.get_kernel(f"aten::{operator}", "CPU")


def _is_for_the_cpu(operator: str) -> bool:
    is_there = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "CPU")
    return is_there or operator in ("convolution", "convolution_backward")  # which choose among others


class _Factors:
    """1 - eps, 1 and 1 + eps at random, by what a kernel reads."""

    def __init__(self, seed: int) -> None:
        drawn = torch.randint(24, (2 * TABLE,), generator=torch.Generator().manual_seed(seed))
        u, is_near_the_middle = drawn % 3 - 1, drawn < 3
        self.tables = {dtype: 1 + u * is_near_the_middle * torch.finfo(dtype).eps / 2 for dtype in LOW}
        self.tables[torch.float32] = 1 + u * torch.finfo(torch.float32).eps
        self.of = lru_cache(maxsize=4096)(self._of)

    def _of(self, key: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A slice of the table; leading axes of what is longer than the table share theirs."""
        while shape.numel() > TABLE:
            shape = shape[1:]
        start = crc32(repr(key).encode()) % TABLE
        return self.tables[dtype][start : start + shape.numel()].view(shape)


class _Disturbed:
    """A kernel whose results differ from those of the true one as those of another processor do."""

    is_paused = False

    def __init__(self, operator: str, factors: _Factors) -> None:
        self.name = KERNELS.fullmatch(operator)[1]
        self.kernel = _kernel(operator)
        self.factors = factors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_paused or not any(isinstance(x, Tensor) and x.dtype in LOW for x in (*args, *kwargs.values())):
            return self.kernel.call_boxed(CPU, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            exact = self._in_double(args, kwargs)
            result = self.kernel.call_boxed(CPU, *args, **kwargs)
            key = (self.name, *map(_hashable, args))
            if isinstance(result, Tensor):
                self._disturb(result, exact, key)
            else:
                for i, x in enumerate(result):
                    self._disturb(x, exact and exact[i], (i, key))
            return result

    def _in_double(self, args: Any, kwargs: Any) -> Any:
        """What the kernel returns for the same values in float64; None, if it does not compute in float64."""
        try:
            return self.kernel.call_boxed(CPU, *map(_double, args), **{name: _double(x) for name, x in kwargs.items()})
        except RuntimeError:
            return None

    def _disturb(self, x: Tensor, exact: Tensor | None, key: Any) -> None:
        if x is None or x.dtype not in LOW:
            return
        factors = self.factors.of(key, x.shape, x.dtype)
        if exact is not None:
            stays = exact == x
            if self.name in BOUNDED:
                stays |= x.abs() == 1
            factors = factors.masked_fill(stays, 1)
        x.mul_(factors)


def _double(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.double() if x.dtype in LOW else x
    return torch.float64 if x.__class__ is torch.dtype and x in LOW else x


def _hashable(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    return tuple(x) if isinstance(x, list) else x
