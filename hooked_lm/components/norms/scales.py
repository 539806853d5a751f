"""Factors in the place of a norm, which does not normalise: NoNorm (Sun et al. 2020, arXiv:2004.02984), which is fast on small
devices, and LayerScale (Touvron et al. 2021, arXiv:2103.17239), a factor for each channel of what a sublayer adds."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norms.norm import RESIDUAL, Norm, NormConfig, upcast


class ChannelScale(Norm):
    """Factors `w` for each channel. It divides by nothing, so it has no sites."""

    def __init__(self, cfg: NormConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.w = nn.Parameter(torch.ones(cfg.d_model))

    def unhooked(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same: there are no hook points."""
        return self(x)

    def gain(self) -> Float[Tensor, " d_model"]:
        """What multiplies the input."""
        return self.w

    def shift(self) -> Float[Tensor, " d_model"] | None:
        """What is added to the product, if anything is."""
        return None


class NoNorm(ChannelScale):
    """`x * w + b`."""

    @dataclass(frozen=True)
    class Config(Norm.Config):
        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "ChannelScale":
            return NoNorm(self)

    def __init__(self, cfg: NormConfig) -> None:
        super().__init__(cfg)
        self.b = nn.Parameter(torch.zeros(cfg.d_model))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return torch.addcmul(self.b, x, self.w)

    def shift(self) -> Float[Tensor, " d_model"]:
        return self.b


class ShiftedScale(ChannelScale):
    """`(x + b) * w` in at least fp32, as in ZAYA1 (Anthony et al. 2025, arXiv:2511.17127)."""

    @dataclass(frozen=True)
    class Config(NoNorm.Config):
        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "ShiftedScale":
            return ShiftedScale(self)

    def __init__(self, cfg: NormConfig) -> None:
        super().__init__(cfg)
        self.b = nn.Parameter(torch.zeros(cfg.d_model))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return (upcast(x) + upcast(self.b)) * upcast(self.w)

    def shift(self) -> Float[Tensor, " d_model"]:
        return upcast(self.b) * upcast(self.w)


class LayerScale(ChannelScale):
    """`x * w`, in the place of a norm after a sublayer.

    `hook_attn_out` and `hook_mlp_out` are after it, `attn.hook_result` and `mlp.hook_out` before it.
    """

    @dataclass(frozen=True)
    class Config(Norm.Config):
        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "LayerScale":
            return LayerScale(self)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return x * self.w
