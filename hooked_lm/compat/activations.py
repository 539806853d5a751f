"""Activation functions by name, and the soft cap of scores and logits."""

from abc import ABCMeta
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


class AnyXIELU(ABCMeta):
    """The metaclass of `XIELU`, of which those in models are instances too."""

    def __instancecheck__(cls, module: object) -> bool:
        return isinstance(module, activations.XIELU)


class XIELU(activations.XIELU, metaclass=AnyXIELU):
    """The trainable activation xIELU (Huang and Schlag 2024, arXiv:2411.13010), with its initial parameters.

    >>> XIELU()(torch.tensor([2.0]))
    tensor([4.2000], grad_fn=<AddBackward0>)
    """

    def __init__(
        self, alpha_p_init: float = 0.8, alpha_n_init: float = 0.8, beta_init: float = 0.5, eps: float = -1e-6
    ) -> None:
        super().__init__(activations.XIELU.Config(beta=beta_init, eps=eps))
        for number, value in ((self.alpha_p, alpha_p_init), (self.alpha_n, alpha_n_init - beta_init)):
            number.data.fill_(value).expm1_().log_()  # the inverse of softplus


def xielu(x: Tensor) -> Tensor:
    """`XIELU` with its initial parameters, not trainable."""
    negative = x.clamp(max=-1e-6).expm1() - x
    return 0.8 * torch.where(x > 0, x * x, negative) + 0.5 * x


# "solu_ln" is SoLU; the norm after it belongs to the MLP
SUPPORTED_ACTIVATIONS: dict[str, ActivationFunction] = {**ACTIVATIONS, "solu_ln": solu, "xielu": xielu}


def softcap_enabled(cap: float | None) -> bool:
    """Whether a soft cap is set: a number above zero."""
    return cap is not None and cap > 0


def apply_softcap(x: Tensor, cap: float | None) -> Tensor:
    """`cap tanh(x / cap)`, between `-cap` and `cap` (Gemma 2, arXiv:2408.00118); x without a cap."""
    return x if cap is None or cap <= 0 else cap * (x / cap).tanh()
