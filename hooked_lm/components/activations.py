"""The activation functions of MLPs, by the names that configs use."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def solu(x: Tensor) -> Tensor:
    """Softmax linear unit: `x * softmax(x)` (Elhage et al. 2022, transformer-circuits.pub/2022/solu/index.html)."""
    return x * x.softmax(-1)


def linear(x: Tensor) -> Tensor:
    """The input itself."""
    return x


def relu2(x: Tensor) -> Tensor:
    """The square of the rectified input (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """The sigmoid approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return x * (1.702 * x).sigmoid()


def gelu_10(x: Tensor) -> Tensor:
    """GELU with its output bounded by 10 either way."""
    return F.gelu(x).clamp(-10, 10)


class Activated(nn.Module):
    """A module that shows an activation function: the value at its `product_site` is the function of the first of its `factors`,
    times the others, if there are others."""

    act_fn: Callable[[Tensor], Tensor]

    @property
    def factors(self) -> tuple[str, ...]:
        """The sites of the factors."""
        return tuple(name for name in ("hook_pre", "hook_pre_linear") if name in self._modules)

    @property
    def product_site(self) -> str:
        """The site of the product of the factors, before a norm that follows it."""
        return "hook_mid" if "hook_mid" in self._modules else "hook_post"


class XIELU(nn.Module):
    """The trained activation of Huang and Schlag (2024, arXiv:2411.13010): quadratic above zero, exponential below.

    `x > 0`: `a_p x^2 + beta x`; else `a_n (exp(min(x, eps)) - 1 - x) + beta x`, where a_p is the softplus of one trained
    number and a_n is beta plus the softplus of another.
    """

    @dataclass(frozen=True)
    class Config:
        beta: float = 0.5
        eps: float = -1e-6

        def build(self) -> "XIELU":
            return XIELU(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        # the checkpoint holds both numbers, rounded as the models were trained
        self.beta, self.eps = nn.Buffer(torch.tensor(cfg.beta)), nn.Buffer(torch.tensor(cfg.eps))

    def forward(self, x: Tensor) -> Tensor:
        up, down = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        negative = (x.clamp(max=self.eps).expm1() - x) * down
        return torch.where(x > 0, up * x * x, negative) + self.beta * x


class GaussianTopK(nn.Module):
    """`act(relu(x - mean - z std))`: about the largest `1 - sparsity` of the neurons of a token are above zero (Gemma 3n).

    Mean and standard deviation are those of the neurons; z is the `sparsity` quantile of the normal distribution.
    """

    @dataclass(frozen=True)
    class Config:
        sparsity: float
        act_fn: str

        def build(self) -> "GaussianTopK":
            return GaussianTopK(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.act, self.quantile = activation(cfg.act_fn), NormalDist().inv_cdf(cfg.sparsity)

    def forward(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(x, -1, correction=0, keepdim=True)
        # the quantile is rounded to the dtype of the model, as in training
        return self.act(F.relu(x - (mean + std * torch.tensor(self.quantile).to(x.dtype))))


def of_multiple(x: Tensor, scale: float, act: Callable[[Tensor], Tensor]) -> Tensor:
    """`act(scale * x)`."""
    return act(x * scale)


@dataclass(frozen=True)
class ScaledAct:
    """The config of a function of a multiple of its input."""

    act_fn: str
    scale: float

    def build(self) -> Callable[[Tensor], Tensor]:
        return partial(of_multiple, scale=self.scale, act=activation(self.act_fn))


gelu_tanh: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": linear,
    "relu": F.relu,
    "relu2": relu2,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_accurate": gelu_tanh,
    "gelu_python_tanh": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_10": gelu_10,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "swish": F.silu,
    "solu": solu,
    "mish": F.mish,
    "tanh": F.tanh,
    "sigmoid": F.sigmoid,
    "softplus": F.softplus,
    "relu6": F.relu6,
}

Activation = str | XIELU.Config | GaussianTopK.Config | ScaledAct


def activation_name(kind: Activation) -> str:
    """The name of a function, or of a module in lower case."""
    if isinstance(kind, ScaledAct):
        return kind.act_fn
    return kind if isinstance(kind, str) else type(kind).__qualname__.split(".")[0].lower()


def activation(kind: Activation) -> Callable[[Tensor], Tensor]:
    """The function of a name, or the module of a config; raises ValueError listing the known names."""
    if not isinstance(kind, str):
        return kind.build()
    if not kind:
        raise ValueError("an MLP needs act_fn, e.g. 'gelu' or 'relu'")
    if kind not in ACTIVATIONS:
        raise ValueError(f"unknown activation '{kind}'; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[kind]
