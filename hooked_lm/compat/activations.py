"""Activation functions by their familiar names, and the bound that some models put on scores and logits."""

from collections.abc import Callable

import torch
from torch import Tensor

from hooked_lm.components import activations
from hooked_lm.components.activations import ACTIVATIONS, gelu_tanh, solu

__all__ = [
    "SOFTCAP_DISABLED", "SUPPORTED_ACTIVATIONS", "XIELU", "ActivationFunction", "apply_softcap", "gelu_pytorch_tanh",
    "softcap_enabled", "xielu",
]  # fmt: skip

ActivationFunction = Callable[..., Tensor]
SOFTCAP_DISABLED: float = -1.0

gelu_pytorch_tanh: ActivationFunction = gelu_tanh


class XIELU(activations.XIELU):
    """The trained activation of Huang and Schlag (2024, arXiv:2411.13010), from the values that its numbers begin at.

    >>> XIELU()(torch.tensor([2.0]))
    tensor([4.2000], grad_fn=<AddBackward0>)
    """

    def __init__(
        self, alpha_p_init: float = 0.8, alpha_n_init: float = 0.8, beta_init: float = 0.5, eps: float = -1e-6
    ) -> None:
        super().__init__(activations.XIELU.Config(beta=beta_init, eps=eps))
        for number, value in ((self.alpha_p, alpha_p_init), (self.alpha_n, alpha_n_init - beta_init)):
            number.data.fill_(value).expm1_().log_()  # softplus gives the value back


def xielu(x: Tensor) -> Tensor:
    """`XIELU` with the numbers that it begins at, fixed."""
    negative = x.clamp(max=-1e-6).expm1() - x
    return 0.8 * torch.where(x > 0, x * x, negative) + 0.5 * x


# "solu_ln" is SoLU before a norm that the MLP has
SUPPORTED_ACTIVATIONS: dict[str, ActivationFunction] = {**ACTIVATIONS, "solu_ln": solu, "xielu": xielu}


def softcap_enabled(cap: float | None) -> bool:
    """Whether there is a bound: a number above zero."""
    return cap is not None and cap > 0


def apply_softcap(x: Tensor, cap: float | None) -> Tensor:
    """`cap tanh(x / cap)`, which stays below `cap` either way (Gemma 2, arXiv:2408.00118); x itself without a bound."""
    return x if cap is None or cap <= 0 else cap * (x / cap).tanh()
