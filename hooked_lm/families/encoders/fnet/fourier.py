"""Mixing by a Fourier transform, without weights (FNet, Lee-Thorp et al. 2021, arXiv:2105.03824)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.mlp import hooked_input
from hooked_lm.components.norms.norm import RESIDUAL, upcast
from hooked_lm.hooks import HookPoint

Stream = Float[Tensor, "batch pos d_model"]


class FourierMixer(nn.Module):
    """The real part of the discrete Fourier transform of a text, over positions and features."""

    axes: dict[str, str] = {}  # it has no weights

    b_out: None = None

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_weights: ClassVar[int] = 0  # in the public count of parameters

        def build(self) -> "FourierMixer":
            return FourierMixer(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.hook_in, self.hook_out = HookPoint(*RESIDUAL, on_demand=True), HookPoint(*RESIDUAL)

    def forward(self, x: Stream, context: Context, layer: int = 0) -> Stream:
        x = hooked_input(self, x)
        out = torch.fft.fft2(upcast(x), dim=(1, 2)).real if context.real is None else self.by_matrix(x, context)
        return self.hook_out(out.to(x.dtype))

    def by_matrix(self, x: Stream, context: Context) -> Stream:
        """The same for each row without its padding, in at least fp32."""
        features, position = torch.fft.fft(upcast(x), dim=2), context.key_positions
        length = position[:, -1:, None] + 1
        turns = position[:, :, None] * position[:, None] % length / length.to(features.real.dtype)
        waves = torch.polar(torch.ones_like(turns), -2 * math.pi * turns).expand(x.shape[0], -1, -1)
        if context.real is not None:
            waves = waves * (context.real[:, None] & context.real[..., None])
        return (waves @ features).real
