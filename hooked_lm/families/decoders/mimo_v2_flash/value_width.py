"""Attention whose values have another width than its queries and keys, and a scale (MiMo-V2-Flash, Xiaomi 2026)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import KEY, QUERY, Attention
from hooked_lm.components.attention.projection import projection
from hooked_lm.hooks import HookPoint


class ValueWidthAttention(Attention):
    """Attention with values `value_scale * x W_V` of width `d_value`: `W_V` is [kv_head, d_model, d_value].

    `hook_v` is after the scale, and `W_O` is [head, d_value, d_model].
    """

    axes = {"W_V": "kv_head [d_model] d_value", "W_O": "[head d_value] d_model"}

    @dataclass(frozen=True)
    class Config(Attention.Config):
        d_value: int = field(kw_only=True)
        value_scale: float = 1.0

        def build(self) -> "ValueWidthAttention":
            return ValueWidthAttention(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.W_V = projection(cfg.n_kv, cfg.d_model, cfg.d_value)
        self.b_V = nn.Parameter(torch.zeros(cfg.n_kv, cfg.d_value)) if cfg.qkv_bias else None
        self.W_O = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_value, cfg.d_model))
        self.hook_v, self.hook_z = HookPoint(*KEY[:-1], "d_value"), HookPoint(*QUERY[:-1], "d_value")

    @property
    def value_weights(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias of values, times their scale."""
        scale = self.cfg.value_scale
        if scale == 1:
            return self.W_V, self.b_V
        return self.W_V * scale, None if self.b_V is None else self.b_V * scale
