"""Hyper-connections (Zhu et al. 2024, arXiv:2409.19606) in the form of Hy4 (Tencent 2026), without mixing of the streams."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norm import RESIDUAL, root_mean_square, upcast
from hooked_lm.components.streams import STREAMS, MergedRMSNorm
from hooked_lm.hooks import HookPoint

Weights = Float[Tensor, "*batch stream"]  # of the streams of a token
SomeStreams = Float[Tensor, "*batch stream d_model"]
Merged = Float[Tensor, "*batch d_model"]


class StreamGate(nn.Module):
    """A weight for each stream: `magnitude * sigmoid(scale * (x W) / rms(x) + b) + eps`, where x are all streams side by side.

    `W` is [stream, d_model, weight]. Computed in at least fp32, in which its weights stay.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_streams: int
        norm_eps: float
        eps: float = 1e-6
        magnitude: float = 1.0

        def build(self) -> "StreamGate":
            return StreamGate(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, n = cfg, cfg.n_streams
        self.W = nn.Parameter(torch.empty(n, cfg.d_model, n))
        self.b, self.scale = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.ones(1))

    def forward(self, streams: SomeStreams) -> Weights:
        cfg, x = self.cfg, upcast(streams.flatten(-2))
        found = F.linear(x, upcast(self.W).flatten(0, 1).T) / root_mean_square(x, cfg.norm_eps)
        return (found * upcast(self.scale) + upcast(self.b)).sigmoid() * cfg.magnitude + cfg.eps

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StreamGate":
        """As `nn.Module._apply`, but the weights stay in fp32 when a model is cast to a lower precision."""
        kept = {name: parameter.data for name, parameter in self._parameters.items() if parameter is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            cast = getattr(self, name)
            if torch.finfo(cast.dtype).bits < torch.finfo(before.dtype).bits:
                setattr(self, name, nn.Parameter(before.to(cast.device), requires_grad=cast.requires_grad))
        return self


def weighted_sum(streams: SomeStreams, weights: Weights) -> Merged:
    """The sum of the streams with these weights."""
    return (weights[..., None] * streams).sum(-2).to(streams.dtype)


class HyperConnection(nn.Module):
    """What a sublayer reads, the sum of the streams with the weights `hook_read`, and how much of its output each stream gets,
    `hook_write`."""

    @dataclass(frozen=True)
    class Config:
        read: StreamGate.Config
        write: StreamGate.Config

        def build(self) -> "HyperConnection":
            return HyperConnection(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.read, self.write = cfg.read.build(), cfg.write.build()
        self.hook_read, self.hook_write = HookPoint(*STREAMS[:3]), HookPoint(*STREAMS[:3])
        self.hook_out = HookPoint(*RESIDUAL)

    def forward(
        self, streams: Float[Tensor, "batch pos stream d_model"]
    ) -> tuple[Float[Tensor, "batch pos d_model"], Float[Tensor, "batch pos stream"]]:
        """The stream that the sublayer reads, and the weights of its output."""
        read, write = self.hook_read(self.read(streams)), self.hook_write(self.write(streams))
        return self.hook_out(weighted_sum(streams, read)), write


class GatedRMSNorm(MergedRMSNorm):
    """The norm of the sum of the streams, with the weights of a `StreamGate`."""

    @dataclass(frozen=True)
    class Config(MergedRMSNorm.Config):
        gate_eps: float = 1e-6

        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "GatedRMSNorm":
            return GatedRMSNorm(self, dims)

    def make_merge(self) -> None:
        cfg = self.cfg
        self.gate = StreamGate.Config(cfg.d_model, cfg.n_streams, cfg.eps, cfg.gate_eps).build()

    def merged(self, streams: SomeStreams) -> Merged:
        """The weighted sum of the streams."""
        return weighted_sum(streams, self.gate(streams))
