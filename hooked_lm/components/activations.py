"""The activation functions of MLPs, by the names that configs use."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor


def solu(x: Tensor) -> Tensor:
    """Softmax linear unit: `x * softmax(x)` (Elhage et al. 2022)."""
    return x * x.softmax(-1)


def relu2(x: Tensor) -> Tensor:
    """The square of the rectified input (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """The sigmoid approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return x * (1.702 * x).sigmoid()


gelu_tanh: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": relu2,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "swish": F.silu,
    "solu": solu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of that name; raises ValueError listing the known ones."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation '{name}'; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
