"""The short causal convolution before a state-space recurrence, and its window of past inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.norms.norm import upcast

Channels = Float[Tensor, "batch pos channel"]
Window = Float[Tensor, "batch tap channel"]


class CausalConvolution(nn.Module):
    """`y[pos] = sum over k of W_conv[k] * x[pos - (width - 1) + k] + b_conv`, for each channel.

    `W_conv` is [width, channel]; inputs before the first token are zero. Padding is skipped: a token is convolved with the real
    tokens before it.
    """

    axes = {"W_conv": "[tap] channel; it is a convolution"}

    @dataclass(frozen=True)
    class Config:
        n_channels: int
        width: int = 4
        bias: bool = True

        def build(self) -> "CausalConvolution":
            return CausalConvolution(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_conv = nn.Parameter(torch.empty(cfg.n_channels, cfg.width).T)
        self.b_conv = nn.Parameter(torch.zeros(cfg.n_channels)) if cfg.bias else None

    def forward(
        self, x: Channels, window: Window | None = None, real: Bool[Tensor, "batch pos"] | None = None
    ) -> tuple[Channels, Window]:
        """Returns the convolved inputs, in at least fp32, and the window for later tokens: the last `width - 1` inputs.

        `window` is that of earlier tokens; `real` marks tokens that are not padding, None: all.
        """
        return after_window(self.convolve, x, self.cfg.width - 1, window, real)

    def convolve(self, inputs: Float[Tensor, "batch taps_and_pos channel"]) -> Channels:
        """The convolved inputs after the first ones, in at least fp32.

        One product per tap: for few taps faster than a grouped convolution, which needs the axes transposed.
        """
        weight, n_pos = upcast(self.W_conv), inputs.shape[1] - self.cfg.width + 1
        inputs = upcast(inputs)
        out = inputs[:, :n_pos] * weight[0]
        for tap in range(1, self.cfg.width):
            out = torch.addcmul(out, inputs[:, tap : tap + n_pos], weight[tap])
        return out if self.b_conv is None else out + upcast(self.b_conv)


def after_window(
    convolve: Callable[[Float[Tensor, "batch taps_and_pos channel"]], Channels],
    x: Channels,
    n_taps: int,
    window: Window | None = None,
    real: Bool[Tensor, "batch pos"] | None = None,
) -> tuple[Channels, Window]:
    """The convolution of the window of earlier tokens and `x`, and the window for later ones: the last `n_taps` inputs.

    Before the first token the window is zero. `real` marks tokens that are not padding, which is skipped.
    """
    n_pos = x.shape[1]
    if window is None:
        window = x.new_zeros(x.shape[0], n_taps, x.shape[2])
    if real is None:
        inputs = torch.cat([window, x], 1)
        return convolve(inputs), inputs[:, n_pos:]
    order = (~real).long().argsort(dim=1, stable=True)  # real tokens first, then padding
    inputs = torch.cat([window, x.take_along_dim(order[..., None], 1)], 1)
    last = real.sum(1, keepdim=True) + torch.arange(n_taps, device=x.device)
    convolved = convolve(inputs).take_along_dim(order.argsort(1)[..., None], 1)
    return convolved, inputs.take_along_dim(last[..., None], 1)
