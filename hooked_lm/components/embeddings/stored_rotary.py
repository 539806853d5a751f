"""Rotary frequencies or angles that a checkpoint contains, possibly rounded as they were in training."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.rotary import Rotary


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


class RotaryTable(nn.Module):
    """A rotary embedding of adjacent pairs, whose sines and cosines are a buffer: `table` [position, 2 * half], sines first."""

    @dataclass(frozen=True)
    class Config:
        rotary: Rotary
        n_ctx: int

        def build(self) -> "RotaryTable":
            return RotaryTable(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        angle = torch.arange(cfg.n_ctx)[:, None] * cfg.rotary.base_frequencies()
        self.table = nn.Buffer(torch.cat([angle.sin(), angle.cos()], -1))

    def put_into(self, context: Context) -> None:
        """Stores the angles in a context, for the layers with this rotary embedding."""

        def angles() -> tuple[Tensor, Tensor]:
            sin, cos = self.table[context.positions][:, :, None].chunk(2, -1)
            return cos, sin

        context.once(self.cfg.rotary, angles)
