"""Norms with the scale of a run held fixed, which makes them linear maps that apply to each component of a sum."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.norms.scales import ChannelScale
from hooked_lm.hooks import Slice
from hooked_lm.models.weights.terms import Factor, times

Vectors = Float[Tensor, "*lead d_model"]


class FixedNorm:
    """A norm with the scale of a run held fixed: the linear map `project(x) / scale`, without the norm's bias.

    Includes the norm's weight only if `gain`: `hook_normalized` is before the weight.
    """

    def __init__(
        self,
        cache: Mapping[Any, Tensor],
        name: str,
        norm: nn.Module,
        pos: Slice,
        gain: bool = False,
        factor: Factor = 1.0,
    ) -> None:
        self.norm, self.factor = norm, factor
        self.gain = norm_gain(norm) if gain else None
        self.scale: Tensor | None = None
        if isinstance(norm, (LayerNorm, RMSNorm)):
            self.scale = pos.apply(cache[f"{name}.hook_scale"], -2)
        elif not isinstance(norm, (nn.Identity, ChannelScale)):
            raise TypeError(f"'{name}' is a {type(norm).__name__}: only a LayerNorm or RMSNorm can be linearised")

    def project(self, x: Vectors) -> Vectors:
        """Centres `x` (LayerNorm) and multiplies by weight and factor: the part that is the same at all positions."""
        if isinstance(self.norm, LayerNorm):
            x = x - x.mean(-1, keepdim=True)
        if self.gain is not None:
            x = (x * self.gain.to(x.device)).to(x.dtype)
        return times(x, self.factor)

    def divide(self, x: Float[Tensor, "*lead n"], extra_axes: int = 0) -> Float[Tensor, "*lead n"]:
        """Divides by the scale of each position; `extra_axes` counts axes of `x` between the position and the last."""
        if self.scale is None:
            return x
        scale = self.scale.reshape(*self.scale.shape[:-1], *[1] * extra_axes, 1)
        return (x / scale.to(x.device)).to(x.dtype)

    def __call__(self, x: Vectors, extra_axes: int = 0) -> Vectors:
        return self.divide(self.project(x), extra_axes)

    def bias_in_stream(self, b: Float[Tensor, " d_model"] | None, like: Vectors) -> Vectors:
        """What a sublayer's bias `b` and the norm's bias add to the stream, shaped as `like`."""
        out = torch.zeros_like(like) if b is None else self(b.detach().to(like).expand_as(like))
        shift = self.norm.shift() if isinstance(self.norm, (LayerNorm, ChannelScale)) else None
        return out if shift is None else out + times(shift.detach().to(like), self.factor)


def norm_gain(norm: nn.Module) -> Float[Tensor, " d_model"] | None:
    """The weight by which a norm multiplies the normalized value; None if it has none."""
    gain = norm.gain() if isinstance(norm, (ChannelScale, LayerNorm, RMSNorm)) else None
    return None if gain is None else gain.detach()
