"""Hyper-connections (Zhu et al. 2024, arXiv:2409.19606): without mixing of the streams as in Hy4 (Tencent 2026), and with a
doubly stochastic mixing (mHC, Xie et al. 2025, arXiv:2512.24880) as in DeepSeek-V4 (DeepSeek-AI 2026). The connections, and
the block between several streams that is made of them."""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.blocks.block import AttentionPart, MLPPart, Stream
from hooked_lm.components.blocks.wiring import Wiring
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, root_mean_square, upcast
from hooked_lm.components.streams import STREAMS, MergedRMSNorm, Streams, StreamsBlock, Wide, separated
from hooked_lm.hooks import HookPoint, hook_if_listening, is_listening

Weights = Float[Tensor, "*batch stream"]  # of the streams of a token
Mixing = Float[Tensor, "*batch from_stream stream"]
SomeStreams = Float[Tensor, "*batch stream d_model"]
Merged = Float[Tensor, "*batch d_model"]


class StreamLogits(nn.Module, ABC):
    """Logits of each token, `scale * (x W) / rms(x) + b`, where x are all streams side by side.

    `W` is [stream, d_model, weight]. Computed in at least fp32, in which its weights stay.
    """

    n_axes: int  # of streams that the logits have
    axes = {"W": "[stream d_model] weight"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_streams: int
        norm_eps: float
        eps: float = 1e-6
        magnitude: float = 1.0

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, n = cfg, cfg.n_streams**self.n_axes
        self.W = nn.Parameter(torch.empty(cfg.n_streams, cfg.d_model, n))
        self.b, self.scale = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.ones(1))

    def logits(self, streams: SomeStreams) -> Float[Tensor, "*batch weight"]:
        """`scale * (x W) / rms(x) + b`."""
        x = upcast(streams.flatten(-2))
        found = F.linear(x, upcast(self.W).flatten(0, 1).T) / root_mean_square(x, self.cfg.norm_eps)
        return found * upcast(self.scale) + upcast(self.b)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StreamLogits":
        """As `nn.Module._apply`, but the weights stay in fp32 when a model is cast to a lower precision."""
        kept = {name: parameter.data for name, parameter in self._parameters.items() if parameter is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            cast = getattr(self, name)
            if torch.finfo(cast.dtype).bits < torch.finfo(before.dtype).bits:
                setattr(self, name, nn.Parameter(before.to(cast.device), requires_grad=cast.requires_grad))
        return self


class StreamGate(StreamLogits):
    """A weight for each stream: `magnitude * sigmoid(logits) + eps`."""

    @dataclass(frozen=True)
    class Config(StreamLogits.Config):
        def build(self) -> "StreamGate":
            return StreamGate(self)

    n_axes = 1

    def forward(self, streams: SomeStreams) -> Tensor:
        return self.logits(streams).sigmoid() * self.cfg.magnitude + self.cfg.eps


class StreamMixer(StreamLogits):
    """A matrix for each token, whose rows and columns sum to about one: new stream k is the sum over j of `mix[j, k]` times
    stream j.

    `softmax(logits)` of each row, plus eps; then columns and rows are divided by their sums in turn, beginning and ending with
    columns, `n_iterations` times (Sinkhorn and Knopp 1967). `W` is [stream, d_model, from_stream * stream].
    """

    @dataclass(frozen=True)
    class Config(StreamLogits.Config):
        n_iterations: int = 20

        def build(self) -> "StreamMixer":
            if self.n_iterations < 1:
                raise ValueError(f"n_iterations={self.n_iterations} must be at least 1")
            return StreamMixer(self)

    cfg: Config
    n_axes = 2

    def forward(self, streams: SomeStreams) -> Mixing:
        n, eps = self.cfg.n_streams, self.cfg.eps
        mix = self.logits(streams).unflatten(-1, (n, n)).softmax(-1) + eps
        for i in range(self.cfg.n_iterations):
            mix = mix / (mix.sum(-1, keepdim=True) + eps) if i else mix
            mix = mix / (mix.sum(-2, keepdim=True) + eps)
        return mix


def mixed(streams: SomeStreams, mix: Mixing) -> SomeStreams:
    """The streams after mixing, in at least fp32."""
    return mix.transpose(-1, -2) @ upcast(streams)


def weighted_sum(streams: SomeStreams, weights: Weights) -> Merged:
    """The sum of the streams with these weights."""
    return (weights[..., None] * streams).sum(-2).to(streams.dtype)


class HyperConnection(nn.Module):
    """What a sublayer reads, the sum of the streams with the weights `hook_read`; how much of its output each stream gets,
    `hook_write`; and with `mix` the matrix that mixes the streams to which the output is added, `hook_mix`."""

    @dataclass(frozen=True)
    class Config:
        read: StreamGate.Config
        write: StreamGate.Config
        mix: StreamMixer.Config | None = None

        def build(self) -> "HyperConnection":
            return HyperConnection(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.read, self.write = cfg.read.build(), cfg.write.build()
        self.hook_read, self.hook_write = HookPoint(*STREAMS[:3]), HookPoint(*STREAMS[:3])
        if cfg.mix is not None:
            self.mix, self.hook_mix = cfg.mix.build(), HookPoint(*STREAMS[:2], "from_stream", "stream")
        self.hook_out = HookPoint(*RESIDUAL)

    def forward(self, streams: Streams) -> tuple[Stream, Float[Tensor, "batch pos stream"], Streams]:
        """The stream that the sublayer reads, the weights of its output, and the streams to which it is added."""
        read, write = self.hook_read(self.read(streams)), self.hook_write(self.write(streams))
        kept = streams if self.cfg.mix is None else mixed(streams, self.hook_mix(self.mix(streams)))
        return self.hook_out(weighted_sum(streams, read)), write, kept


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


class HyperBlock(StreamsBlock, AttentionPart, MLPPart):
    """`streams + write attn(ln1(x))` with x = `read streams`, then the same with the MLP.

    The weights read and write, a number per stream, come from the streams (`attn_hc`, `mlp_hc`), as does the matrix by which
    streams are mixed before the addition, if there is one. `hook_streams_pre`,
    `hook_streams_mid` and `hook_streams_post` are all streams. `hook_resid_pre`, `hook_resid_mid` and `hook_resid_post` are
    their mean; an edit of it is added to each stream. What a sublayer reads is `attn_hc.hook_out` or `mlp_hc.hook_out`. The
    `first` layer starts with copies of the embedding.
    """

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        hc: HyperConnection.Config = field(kw_only=True)
        first: bool = False

        def build(self, layer: int) -> "HyperBlock":
            return HyperBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        self.hook_streams_pre = HookPoint(*STREAMS)
        self.move_to_end("hook_resid_pre")
        self.attn_hc = self.cfg.hc.build()
        self.make_attention()
        self.hook_streams_mid, self.hook_resid_mid = HookPoint(*STREAMS), HookPoint(*RESIDUAL)
        self.mlp_hc = self.cfg.hc.build()
        self.make_mlp()
        self.hook_streams_post, self.hook_resid_post = HookPoint(*STREAMS), HookPoint(*RESIDUAL)

    def forward(self, resid: Wide | Stream, context: Context | None = None) -> Float[Tensor, "batch pos width"]:
        streams = self.entering(resid)
        x, write, kept = self.attn_hc(streams)
        streams = self.hook_streams_mid(written(kept, self.attn_out(x, context), write).to(resid.dtype))
        streams = with_mean(self.hook_resid_mid, streams)
        x, write, kept = self.mlp_hc(streams)
        streams = self.hook_streams_post(written(kept, self.mlp_out_of(x, context), write).to(resid.dtype))
        return with_mean(self.hook_resid_post, streams).flatten(2)

    def wiring(self) -> Wiring:
        return Wiring(
            by_hand="several streams, of which each sublayer reads a weighted sum and writes a multiple into each"
        )

    def mlp_out_of(self, x: Stream, context: Context | None) -> Stream:
        """The output of the MLP to the streams."""
        beside = self.beside_mlp(context)
        return self.apply_mlp(self.ln2(hook_if_listening(self.hook_mlp_in, x)), *beside)

    def beside_mlp(self, context: Context | None) -> tuple[Tensor, ...]:
        """What the MLP reads beside a stream; most read nothing."""
        return ()

    def entering(self, resid: Wide | Stream) -> Streams:
        """The streams before the layer."""
        n, d_model = self.cfg.hc.read.n_streams, self.cfg.hc.read.d_model
        if self.cfg.first and resid.shape[-1] == d_model:
            streams = resid[:, :, None].expand(-1, -1, n, -1).contiguous()
        else:
            streams = separated(resid, n, d_model)
        return with_mean(self.hook_resid_pre, self.hook_streams_pre(streams))

    def attn_stream(self, resid: Wide | Stream) -> Stream:
        """The sum of streams that attention reads."""
        return self.attn_hc(self.entering(resid))[0]


def written(streams: Streams, out: Stream, write: Float[Tensor, "batch pos stream"]) -> Streams:
    """The streams, each plus its part of an output; in at least fp32."""
    return write[..., None] * upcast(out)[:, :, None] + upcast(streams)


def with_mean(point: HookPoint, streams: Streams) -> Streams:
    """The streams after their mean has passed a point, whose change is added to each."""
    if not is_listening(point):
        return streams
    mean = streams.mean(2)
    return streams + (point(mean) - mean)[:, :, None]
