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

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.W_O = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_head, cfg.d_out))
        self.b_O = nn.Parameter(torch.zeros(cfg.d_out)) if cfg.out_bias else None
