"""Mamba with heads (Zamba, Glorioso et al. 2024, arXiv:2405.16712): the channels of a head make its step size, B and C."""

from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.ssm.mamba import AbstractMamba, Mamba


class MambaHeads(AbstractMamba):
    """`Mamba` in which each head has a step size, B and C of its own, made from its own channels.

    `W_dt_down` is [ssm_head, d_head, dt_rank], `W_dt_up` [ssm_head, dt_rank, d_head], `W_B` and `W_C`
    [ssm_head, d_head, d_state]; a head has d_inner / n_heads channels, which follow each other. `hook_B` and `hook_C` have an
    axis of heads.
    """

    axes = {
        "W_dt_down": "ssm_head [d_channel] dt_rank; it is block-diagonal",
        "W_dt_up": "ssm_head [dt_rank] d_channel; it is block-diagonal",
        "W_B": "ssm_head [d_channel] d_state; it is block-diagonal",
        "W_C": "ssm_head [d_channel] d_state; it is block-diagonal",
    }

    @dataclass(frozen=True)
    class Config(Mamba.Config):
        n_heads: int = 1

        def build(self) -> "MambaHeads":
            return MambaHeads(self)

    cfg: Config
    state_dims = ("batch", "pos", "ssm_head", "d_state")

    def make_selection(self) -> None:
        n, width = self.cfg.n_heads, self.cfg.d_inner // self.cfg.n_heads
        if n * width != self.cfg.d_inner:
            raise ValueError(f"d_inner={self.cfg.d_inner} must be a multiple of n_heads={n}")
        self.W_dt_down = nn.Parameter(torch.empty(n, self.cfg.dt_rank, width).mT)
        self.W_dt_up = nn.Parameter(torch.empty(n, width, self.cfg.dt_rank).mT)
        self.W_B = nn.Parameter(torch.empty(n, self.cfg.d_state, width).mT)
        self.W_C = nn.Parameter(torch.empty(n, self.cfg.d_state, width).mT)

    def heads(self, x: Float[Tensor, "batch pos d_inner *d_state"]) -> Float[Tensor, "batch pos head *inner"]:
        return x.unflatten(2, (self.cfg.n_heads, -1))

    def product(self, x: Float[Tensor, "batch pos head d_in"], W: Tensor) -> Float[Tensor, "batch pos head width"]:
        return einsum(x, W, "batch pos head d_in, head d_in width -> batch pos head width")
