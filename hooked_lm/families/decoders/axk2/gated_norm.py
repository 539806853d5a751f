"""An RMS norm with a gate of low rank (A.X K2, SK Telecom 2026)."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norms.norm import RESIDUAL, RMSNorm, upcast
from hooked_lm.hooks import HookPoint, is_listening


class LowRankGatedNorm(RMSNorm):
    """`y * sigmoid(silu(y W_down) W_up)` with `y = norm(x)`. `hook_gate` is before the sigmoid.

    Such a norm is not folded into the weights after it.
    """

    axes = {"W_down": "[width] d_gate; it is part of a norm", "W_up": "[d_gate] width; it is part of a norm"}

    @dataclass(frozen=True)
    class Config(RMSNorm.Config):
        d_gate: int = field(kw_only=True)

        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "LowRankGatedNorm":
            return LowRankGatedNorm(self, dims)

    cfg: Config

    def __init__(self, cfg: Config, dims: tuple[str, ...] = RESIDUAL) -> None:
        super().__init__(cfg, dims)
        self.W_down = nn.Parameter(torch.empty(cfg.d_model, cfg.d_gate))
        self.W_up = nn.Parameter(torch.empty(cfg.d_gate, cfg.d_model))
        self.hook_gate = HookPoint(*dims)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        if is_listening(self.hook_gate) and not is_listening(self.hook_scale, self.hook_normalized):
            y = super().unhooked(x)
            return self.opened(y, self.hook_gate(self.gate(y)))
        return super().forward(x)

    def unhooked(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The same output, without the hook points."""
        y = super().unhooked(x)
        return self.opened(y, self.gate(y))

    def apply_weights(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The output for a normalised value."""
        y = super().apply_weights(normalized)
        return self.opened(y, self.hook_gate(self.gate(y)))

    def gate(self, y: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The gate before its sigmoid."""
        return F.linear(F.silu(F.linear(y, self.W_down.T)), self.W_up.T)

    def opened(
        self, y: Float[Tensor, "*batch d_model"], gate: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch d_model"]:
        """The normalised value times the open gate, which is computed in at least fp32."""
        return (y * upcast(gate).sigmoid()).to(y.dtype)
