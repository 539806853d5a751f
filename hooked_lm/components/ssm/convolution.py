"""The short causal convolution in front of a state-space recurrence, and the window of inputs that it remembers."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.norm import wide

Channels = Float[Tensor, "batch pos channel"]
Window = Float[Tensor, "batch tap channel"]


class CausalConvolution(nn.Module):
    """`y[pos] = sum over k of W_conv[k] * x[pos - (width - 1) + k] + b_conv`, each channel by itself.

    `W_conv` is [width, channel]; before the first token there are zeros. Padding is passed over: a token's neighbours are
    the real tokens before it, wherever the padding stands.
    """

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
        """The convolved inputs, in at least fp32, and the window for the tokens that come next: the last `width - 1` inputs.

        `window` is that of the tokens before; `real` marks what is no padding, None: everything.
        """
        n_pos, n_taps = x.shape[1], self.cfg.width - 1
        if window is None:
            window = x.new_zeros(x.shape[0], n_taps, x.shape[2])
        if real is None:
            seen = torch.cat([window, x], 1)
            return self._convolve(seen), seen[:, n_pos:]
        order = (~real).long().argsort(dim=1, stable=True)  # the real tokens side by side, padding after them
        seen = torch.cat([window, x.take_along_dim(order[..., None], 1)], 1)
        last = real.sum(1, keepdim=True) + torch.arange(n_taps, device=x.device)
        convolved = self._convolve(seen).take_along_dim(order.argsort(1)[..., None], 1)
        return convolved, seen.take_along_dim(last[..., None], 1)

    def _convolve(self, seen: Float[Tensor, "batch taps_and_pos channel"]) -> Channels:
        """A product for each tap: for a few taps faster than a grouped convolution, whose axes lie the other way."""
        weight, n_pos = wide(self.W_conv), seen.shape[1] - self.cfg.width + 1
        seen = wide(seen)
        out = seen[:, :n_pos] * weight[0]
        for tap in range(1, self.cfg.width):
            out = torch.addcmul(out, seen[:, tap : tap + n_pos], weight[tap])
        return out if self.b_conv is None else out + wide(self.b_conv)
