"""Rotary frequencies that a checkpoint contains, possibly rounded as they were in training."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.rotary import Rotary


class StoredRotary(nn.Module):
    """The angles of a rotary embedding whose `frequencies` [half], in radians per position, are a buffer in fp32."""

    @dataclass(frozen=True)
    class Config:
        rotary: Rotary

        def build(self) -> "StoredRotary":
            return StoredRotary(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.frequencies = nn.Buffer(cfg.rotary.base_frequencies())

    def put_into(self, context: Context) -> None:
        """Stores the angles in a context, for the layers with this rotary embedding."""

        def angles() -> tuple[Tensor, Tensor]:
            angle = context.positions[..., None, None].float() * self.frequencies
            return self.cfg.rotary.cos_sin(angle)

        context.once(self.cfg.rotary, angles)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StoredRotary":
        """Moves the frequencies to other devices, but never to another dtype."""
        before = self.frequencies
        super()._apply(fn, recurse)
        if self.frequencies.dtype != before.dtype:
            self.frequencies = nn.Buffer(before.to(self.frequencies.device))
        return self
