"""In-place initialisation of weights in the layout [head, in, out].

Like those of `torch.nn.init`, the functions draw from torch's default generator, or from `generator`.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

__all__ = [
    "NonlinearityType", "calc_fan_in_and_fan_out", "init_kaiming_normal_", "init_kaiming_uniform_",
    "init_xavier_normal_", "init_xavier_uniform_",
]  # fmt: skip

NonlinearityType = Literal[
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "sigmoid", "tanh",
    "relu", "leaky_relu", "selu",
]  # fmt: skip


def calc_fan_in_and_fan_out(tensor: Tensor) -> tuple[int, int]:
    """The fan in and fan out of a weight: the number of inputs per output, and of outputs per input.

    The weight is a bias [out], a matrix [in, out], or the weights of heads [head, in, out]. Raises ValueError for other shapes.

    >>> import torch
    >>> calc_fan_in_and_fan_out(torch.zeros(12, 768, 64))
    (768, 768)
    """
    shape = tensor.shape
    if not 1 <= len(shape) <= 3:
        raise ValueError(f"expected the shape [out], [in, out] or [head, in, out], got {list(shape)}")
    heads = shape[0] if len(shape) == 3 else 1
    return shape[-2] if len(shape) > 1 else 1, heads * shape[-1]


def init_xavier_uniform_(param: Tensor, gain: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Draws from a uniform distribution of variance `2 gain^2 / (fan in + fan out)` (Glorot and Bengio 2010)."""
    return _uniform(param, gain * math.sqrt(2 / sum(calc_fan_in_and_fan_out(param))), generator)


def init_xavier_normal_(param: Tensor, gain: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Draws from a normal distribution of variance `2 gain^2 / (fan in + fan out)` (Glorot and Bengio 2010)."""
    std = gain * math.sqrt(2 / sum(calc_fan_in_and_fan_out(param)))
    return nn.init.normal_(param, std=std, generator=generator)


def init_kaiming_uniform_(
    param: Tensor,
    a: float = 0.0,
    nonlinearity: NonlinearityType = "relu",
    gain: float = 1.0,
    mode: str = "fan_in",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws from a uniform distribution of variance `(gain * g)^2 / fan` (He et al. 2015, arXiv:1502.01852).

    g is `torch.nn.init.calculate_gain(nonlinearity, a)`; `mode` selects "fan_in" or "fan_out".
    """
    return _uniform(param, _kaiming(param, a, nonlinearity, gain, mode), generator)


def init_kaiming_normal_(
    param: Tensor,
    a: float = 0.0,
    nonlinearity: NonlinearityType = "relu",
    gain: float = 1.0,
    mode: str = "fan_in",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws from a normal distribution with the variance of `init_kaiming_uniform_`."""
    return nn.init.normal_(param, std=_kaiming(param, a, nonlinearity, gain, mode), generator=generator)


def _kaiming(param: Tensor, a: float, nonlinearity: NonlinearityType, gain: float, mode: str) -> float:
    """The standard deviation."""
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"mode must be 'fan_in' or 'fan_out', got {mode!r}")
    fan = calc_fan_in_and_fan_out(param)[mode == "fan_out"]
    return gain * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)


def _uniform(param: Tensor, std: float, generator: torch.Generator | None) -> Tensor:
    bound = std * math.sqrt(3)
    return nn.init.uniform_(param, -bound, bound, generator=generator)
