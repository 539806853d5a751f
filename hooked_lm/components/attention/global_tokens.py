"""Attention within a window whose checkpoints also have weights for tokens of global attention (Beltagy et al. 2020,
arXiv:2004.05150)."""

from dataclasses import dataclass

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.projection import add_projections


class WindowAttention(Attention):
    """Attention that keeps the weights of global tokens, `W_Q_global`, `W_K_global` and `W_V_global`, and does not use them.

    Without global tokens, which are an input beside the text and not supported, the result is that of `Attention`. The weights
    are there to be written back.
    """

    @dataclass(frozen=True)
    class Config(Attention.Config):
        def build(self) -> "WindowAttention":
            return WindowAttention(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        add_projections(self, cfg, cfg.d_model, suffix="_global")
