"""Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692): Gated DeltaNet with a decay for each column of the state."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norms.norm import upcast
from hooked_lm.components.ssm.delta_net import AbstractDeltaNet, GatedDeltaNet, PerHead
from hooked_lm.components.ssm.mamba import initial_dt_bias
from hooked_lm.components.ssm.mamba2 import HEADS
from hooked_lm.components.ssm.mixer import Stream
from hooked_lm.hooks import HookPoint

LOW = ("g", "gate")  # the projections that may have a rank


class KimiDeltaAttention(AbstractDeltaNet):
    """`GatedDeltaNet` with `S' = S[pos - 1] diag(exp(g))`, where each head and each of its `d_state` columns has a g.

    With r = `x W_g + dt_bias` and a rate `exp(A_log)` for each head, `g = -rate * softplus(r)`, or with a `lower_bound`
    `g = lower_bound * sigmoid(rate * r)`. `W_g` is [d_model, ssm_head * d_state], `dt_bias` [ssm_head, d_state]. With a `rank`
    both `W_g` and `W_gate` are products of `W_g_down` [d_model, rank] and `W_g_up` [rank, ...]. `hook_g` has an axis `d_state`.
    """

    axes = {
        "W_g": "[d_model] d_decay",
        "W_g_down": "[d_model] rank",
        "W_g_up": "[rank] d_decay",
        "W_gate_down": "[d_model] rank",
        "W_gate_up": "[rank] d_inner",
    }

    @dataclass(frozen=True)
    class Config(GatedDeltaNet.Config):
        gate_act_fn: str = "sigmoid"
        rank: int | None = None  # of the projections of g and of the gate
        lower_bound: float | None = None  # of g

        @property
        def widths(self) -> dict[str, int]:
            """The width of each projection of the input."""
            wide = super().widths | {"g": self.n_heads * self.d_state}
            return {self.of_input(name): self.rank or width if name in LOW else width for name, width in wide.items()}

        def of_input(self, name: str) -> str:
            """The name of the part of a projection that is applied to the input."""
            return f"{name}_down" if self.rank and name in LOW else name

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            return super().n_weights + (self.rank or 0) * (self.n_heads * self.d_state + self.d_inner)

        def build(self) -> "KimiDeltaAttention":
            return KimiDeltaAttention(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        if cfg.rank:
            for name, width in zip(LOW, (cfg.n_heads * cfg.d_state, cfg.d_inner), strict=True):
                self.register_parameter(f"W_{name}_up", nn.Parameter(torch.empty(width, cfg.rank).T))
        self.dt_bias = nn.Parameter(initial_dt_bias(cfg.n_heads * cfg.d_state).view(cfg.n_heads, cfg.d_state))
        self.hook_g = HookPoint(*HEADS[:3], "d_state")

    def low_rank(self, stream: Stream, name: str) -> Tensor:
        """The projection by `W_name`, or by its two factors."""
        if not self.cfg.rank:
            return self.linear(stream, name)
        return F.linear(self.linear(stream, f"{name}_down"), getattr(self, f"W_{name}_up").T)

    def gate(self, stream: Stream) -> PerHead:
        return self.low_rank(stream, "gate").unflatten(-1, (-1, self.cfg.d_head))

    def log_decay(self, stream: Stream) -> Float[Tensor, "batch pos ssm_head d_state"]:
        raw = upcast(self.low_rank(stream, "g")).unflatten(-1, (self.cfg.n_heads, -1)) + upcast(self.dt_bias)
        rate = upcast(self.A_log).exp()[:, None]
        if self.cfg.lower_bound is None:
            return -rate * F.softplus(raw)
        return self.cfg.lower_bound * (rate * raw).sigmoid()
