"""Attention that reads a wider vector than it writes."""

from dataclasses import dataclass, field

import torch
from torch import nn

from hooked_lm.components.attention.multihead import Attention


class WideAttention(Attention):
    """Attention whose input has `d_model` features and whose output `d_out`: `W_O` is [head, d_head, d_out]."""

    axes = {"W_O": "[head d_head] d_out"}

    @dataclass(frozen=True)
    class Config(Attention.Config):
        d_out: int = field(kw_only=True)

        def build(self) -> "WideAttention":
            return WideAttention(self)

    cfg: Config

    def make_mixing(self, cfg: Config, d_value: int) -> None:  # type: ignore[override]
        super().make_mixing(cfg, d_value)
        self.W_O = nn.Parameter(torch.empty(cfg.n_heads, d_value, cfg.d_out))
        self.b_O = nn.Parameter(torch.zeros(cfg.d_out)) if cfg.out_bias else None
