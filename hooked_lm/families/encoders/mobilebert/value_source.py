"""Attention whose values read a wider vector than its queries and keys (MobileBERT, Sun et al. 2020, arXiv:2004.02984)."""

from dataclasses import dataclass, field

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.projection import projection


class ValueSourceAttention(Attention):
    """Attention with values from another vector, of width `d_value_source`: `W_V` is [kv_head, d_value_source, d_head]."""

    axes = {"W_V": "kv_head [d_value_source] d_head"}

    @dataclass(frozen=True)
    class Config(Attention.Config):
        d_value_source: int = field(kw_only=True)

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            others = self.d_model * self.d_head * (2 * self.n_heads + self.n_kv)
            return others + self.d_value_source * self.d_head * self.n_kv

        def build(self) -> "ValueSourceAttention":
            return ValueSourceAttention(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.W_V = projection(cfg.n_kv, cfg.d_value_source, cfg.d_head)
