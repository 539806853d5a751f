"""Norms with the divisor they had in a run. So held, a norm is a linear map, and a sum can be taken apart after it."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.layer_norm import LayerNorm
from hooked_lm.components.norm import RMSNorm
from hooked_lm.hooks import Slice

Vectors = Float[Tensor, "*lead d_model"]


class FixedNorm:
    """A norm with the divisor it had in a run: a linear map, `direction(x) / scale`, but for the norm's bias.

    The map covers the norm's weight only where `gain` says so: `hook_normalized` stands before it.
    """

    def __init__(
        self,
        cache: Mapping[Any, Tensor],
        name: str,
        norm: nn.Module,
        pos: Slice,
        gain: bool = False,
        factor: float = 1.0,
    ) -> None:
        self.norm, self.factor = norm, factor
        self.gain = norm_gain(norm) if gain else None
        self.scale: Tensor | None = None
        if isinstance(norm, (LayerNorm, RMSNorm)):
            self.scale = pos.apply(cache[f"{name}.hook_scale"], -2)
        elif not isinstance(norm, nn.Identity):
            raise TypeError(f"'{name}' is a {type(norm).__name__}: only a LayerNorm or RMSNorm can be taken apart")

    def direction(self, x: Vectors) -> Vectors:
        """The part of the map that is the same at all positions."""
        if isinstance(self.norm, LayerNorm):
            x = x - x.mean(-1, keepdim=True)
        if self.gain is not None:
            x = (x * self.gain.to(x.device)).to(x.dtype)
        return x if self.factor == 1.0 else x * self.factor

    def divided(self, x: Float[Tensor, "*lead n"], extra_axes: int = 0) -> Float[Tensor, "*lead n"]:
        """The part that is not; `extra_axes` are between the positions and the last axis of `x`."""
        if self.scale is None:
            return x
        scale = self.scale.reshape(*self.scale.shape[:-1], *[1] * extra_axes, 1)
        return (x / scale).to(x.dtype)

    def __call__(self, x: Vectors, extra_axes: int = 0) -> Vectors:
        return self.divided(self.direction(x), extra_axes)

    def output(self, b: Float[Tensor, " d_model"] | None, like: Vectors) -> Vectors:
        """What arrives in the stream where the sublayer's bias is `b`: the norm's own bias included."""
        out = torch.zeros_like(like) if b is None else self(b.detach().to(like).expand_as(like))
        shift = self.norm.shift() if isinstance(self.norm, LayerNorm) else None
        return out if shift is None else out + self.factor * shift.detach().to(like)


def norm_gain(norm: nn.Module) -> Float[Tensor, " d_model"] | None:
    """What a norm multiplies the normalised value by; None for nothing."""
    gain = norm.gain() if isinstance(norm, (LayerNorm, RMSNorm)) else None
    return None if gain is None else gain.detach()
