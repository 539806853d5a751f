"""LayerScale (Touvron et al. 2021, arXiv:2103.17239): a factor for each channel of what a sublayer adds to the stream."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norms.norm import RESIDUAL, Norm


class LayerScale(Norm):
    """`x * w`, in the place of a norm after a sublayer. It divides by nothing, so it has no sites.

    `hook_attn_out` and `hook_mlp_out` are after it, `attn.hook_result` and `mlp.hook_out` before it.
    """

    @dataclass(frozen=True)
    class Config(Norm.Config):
        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "LayerScale":
            return LayerScale(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.w = nn.Parameter(torch.ones(cfg.d_model))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return x * self.w

    def unhooked(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same: there are no hook points."""
        return self(x)

    def gain(self) -> Float[Tensor, " d_model"]:
        """The factors."""
        return self.w
