"""What models with several residual streams have in common: the token embedding becomes all of them, blocks read and write
several, and the final norm reads one vector that is made of all. Alternating updates (AltUp, Baykal et al. 2023,
arXiv:2301.13310; Gemma 3n, Google DeepMind 2025) and hyper-connections (Zhu et al. 2024, arXiv:2409.19606) differ in how.

Blocks hand on the streams side by side in one tensor, [batch, pos, stream * d_model].
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.blocks.block import Block
from hooked_lm.components.norms.norm import RESIDUAL, RMSNorm, upcast
from hooked_lm.hooks import HookPoint

STREAMS = ("batch", "pos", "stream", "d_model")
SMALLEST = 1e-5  # mean square of a projection, below which it is not scaled up further

Stream = Float[Tensor, "batch pos d_model"]
Streams = Float[Tensor, "batch pos stream d_model"]
Wide = Float[Tensor, "batch pos stream_x_d_model"]


def separated(wide: Wide, n_streams: int, d_model: int) -> Float[Tensor, "batch pos stream d_model"]:
    """The streams of one tensor; ValueError if it does not hold all of them."""
    if wide.shape[-1] != n_streams * d_model:
        raise ValueError(
            f"expected all {n_streams} residual streams, [batch, pos, {n_streams * d_model}], as stop_at_layer returns them; "
            f"got {tuple(wide.shape)}"
        )
    return wide.unflatten(-1, (n_streams, d_model))


def _projected(x: Float[Tensor, "*batch d_model"], weight: Tensor, like: Tensor) -> Float[Tensor, "*batch d_model"]:
    """`x W`, scaled to the root mean square of `like`."""
    out = F.linear(x, weight.T)
    size = upcast(out).square().mean(-1, keepdim=True).clamp(min=SMALLEST).sqrt()
    return (upcast(out) * (upcast(like).square().mean(-1, keepdim=True).sqrt() / size)).to(out.dtype)


def _projections(n_streams: int, d_model: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.empty(d_model, d_model)) for _ in range(n_streams - 1))


class SplitStreams(nn.Module):
    """The streams of an embedding x: x itself, and `x W` for each other stream, scaled to the root mean square of x."""

    axes = {"W": "[d_model] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_streams: int

        def build(self) -> "SplitStreams":
            return SplitStreams(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W = _projections(cfg.n_streams, cfg.d_model)

    def forward(self, embed: Stream) -> Float[Tensor, "batch pos stream d_model"]:
        return torch.stack([embed, *(_projected(embed, weight, embed) for weight in self.W)], 2)


class MergedRMSNorm(RMSNorm):
    """The norm of the mean over all streams; each but the first is projected, and scaled to the root mean square of the first.

    `hook_in` is that mean. `unhooked` is the norm alone.
    """

    axes = {"W": "[d_model] d_model"}

    @dataclass(frozen=True)
    class Config(RMSNorm.Config):
        n_streams: int = 1

        def build(self, dims: tuple[str, ...] = RESIDUAL) -> "MergedRMSNorm":
            return MergedRMSNorm(self, dims)

    def __init__(self, cfg: Config, dims: tuple[str, ...] = RESIDUAL) -> None:
        super().__init__(cfg, dims)
        self.make_merge()
        self.hook_in = HookPoint(*dims)
        for name in ("hook_scale", "hook_normalized"):  # the order of computation, in which sites are listed
            self._modules[name] = self._modules.pop(name)

    def forward(self, wide: Wide) -> Stream:
        return super().forward(self.hook_in(self.merged(separated(wide, self.cfg.n_streams, self.cfg.d_model))))

    def make_merge(self) -> None:
        """Adds the weights of the mean."""
        self.W = _projections(self.cfg.n_streams, self.cfg.d_model)

    def merged(self, streams: Float[Tensor, "*batch stream d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The mean over the streams, projected and scaled."""
        first, *others = streams.unbind(-2)
        projected = [_projected(x, weight, first) for x, weight in zip(others, self.W, strict=True)]
        return torch.stack([first, *projected], -2).mean(-2)


class StreamsBlock(Block):
    """A layer that reads and writes several streams."""

    further_streams = ("streams",)  # `hook_streams_post` is the next block's `hook_streams_pre`

    @abstractmethod
    def attn_stream(self, resid: Wide | Stream) -> Stream:
        """The stream that attention reads, from what enters the layer."""
