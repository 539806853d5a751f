"""A block between several residual streams, by alternating updates (AltUp, Baykal et al. 2023, arXiv:2301.13310), with a
low-rank branch (LAuReL, Menghani et al. 2024, arXiv:2411.07501), as in Gemma 3n (Google DeepMind 2025)."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.blocks.block import AttentionPart, MLPPart, Stream
from hooked_lm.components.blocks.per_layer import PerLayerGate, PerLayerPart
from hooked_lm.components.blocks.wiring import Wiring
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, NormConfig, upcast
from hooked_lm.components.streams import STREAMS, SplitStreams, Streams, StreamsBlock, Wide, separated
from hooked_lm.hooks import HookPoint, is_listening

Mixing = Float[Tensor, "batch pos stream source_stream"]
Factors = Float[Tensor, "batch pos stream"]


class AltUp(nn.Module):
    """The coefficients of both steps, from gates `tanh(norm(x) W_router / d_model)` of the active stream x.

    Predicting: stream t gets in addition the sum over streams f of `coefs[t, f]` times stream f, with `coefs` = gates
    `W_predict`. Correcting: it gets `1 + gates W_correct` times what the layer added to the prediction of the active stream.
    `w` is the weight of the norm.
    """

    axes = {
        "W_router": "[d_model] gate",
        "W_predict": "[gate] stream source_stream; it makes coefficients of streams",
        "W_correct": "[gate] stream; it makes coefficients of streams",
    }

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_streams: int
        active: int = 0  # the stream that the layer reads and writes
        eps: float = 1e-6

        def build(self) -> "AltUp":
            return AltUp(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, n = cfg, cfg.n_streams
        self.w = nn.Parameter(torch.ones(cfg.d_model))
        self.W_router = nn.Parameter(torch.empty(cfg.d_model, n))
        self.W_predict = nn.Parameter(torch.empty(n, n, n))  # [gate, stream, source_stream]
        self.W_correct = nn.Parameter(torch.empty(n, n))  # [gate, stream]

    def gates(self, active: Stream) -> Float[Tensor, "batch pos gate"]:
        """The gates for a value of the active stream."""
        d_model = self.cfg.d_model
        normalized = F.rms_norm(upcast(active), (d_model,), upcast(self.w), self.cfg.eps).to(active.dtype)
        return upcast(F.linear(normalized / d_model, self.W_router.T)).tanh().to(active.dtype)

    def predict_coefs(self, active: Stream) -> Mixing:
        """What each stream gets of each in the prediction, besides itself."""
        n = self.cfg.n_streams
        return F.linear(self.gates(active), self.W_predict.flatten(1).T).unflatten(-1, (n, n))

    def correct_coefs(self, active: Stream) -> Factors:
        """What each stream gets of the layer's change."""
        return F.linear(self.gates(active), self.W_correct.T) + 1.0


class Laurel(nn.Module):
    """`x + norm(x W_in W_out)`; `hook_pre` is `x W_in`, of a low rank."""

    axes = {"W_in": "[d_model] rank", "W_out": "[rank] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        rank: int
        norm: NormConfig

        def build(self) -> "Laurel":
            return Laurel(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_in = nn.Parameter(torch.empty(cfg.d_model, cfg.rank))
        self.W_out = nn.Parameter(torch.empty(cfg.rank, cfg.d_model))
        self.hook_pre = HookPoint("batch", "pos", "rank")
        self.norm = cfg.norm.build()

    def forward(self, x: Stream) -> Stream:
        return x + self.norm(F.linear(self.hook_pre(F.linear(x, self.W_in.T)), self.W_out.T))


class AltUpBlock(StreamsBlock, PerLayerPart, AttentionPart, MLPPart):
    """A layer that reads and writes one of several streams, the active one, and updates all.

    With the prediction p of the active stream from all streams:
    `mid = (p + attn(ln1(p)) + laurel(ln1(p))) / sqrt(2)`, `activated = mid + mlp(ln2(mid))`. Each stream is then its prediction
    plus a multiple of `activated - p`, and each but the first gets the gated per-layer embedding.

    `hook_resid_pre` and `hook_resid_post` are the active stream before and after the layer, `hook_streams_pre` and
    `hook_streams_post` all streams; an edit of either is an edit of both. `hook_predicted` are the predictions of all streams,
    `hook_resid_mid` and `hook_activated` the active stream inside the layer, `hook_corrected` all streams before the per-layer
    embedding. The first layer makes the streams from the embedding (`split`).
    """

    @dataclass(frozen=True)
    class Config(MLPPart.Config, AttentionPart.Config):
        """With `scales_gate` the gate of the per-layer embedding reads the active stream times `gate_scale`."""

        altup: AltUp.Config = field(kw_only=True)
        laurel: Laurel.Config = field(kw_only=True)
        per_layer: PerLayerGate.Config = field(kw_only=True)
        per_layer_post: NormConfig | None = None
        split: SplitStreams.Config | None = None
        scales_gate: bool = True

        def build(self, layer: int) -> "AltUpBlock":
            return AltUpBlock(self, layer)

    cfg: Config

    def make_parts(self) -> None:
        cfg = self.cfg
        if cfg.split is not None:
            self.split = cfg.split.build()
        self.hook_streams_pre = HookPoint(*STREAMS)
        self.move_to_end("hook_resid_pre")
        self.altup = cfg.altup.build()
        self.hook_predict_coefs = HookPoint(*STREAMS[:3], "source_stream")
        self.hook_predicted = HookPoint(*STREAMS)
        self.make_attention()
        self.laurel = cfg.laurel.build()
        self.hook_laurel_out, self.hook_resid_mid = HookPoint(*RESIDUAL), HookPoint(*RESIDUAL)
        self.make_mlp()
        self.hook_activated, self.hook_correct_coefs = HookPoint(*RESIDUAL), HookPoint(*STREAMS[:3])
        self.hook_corrected = HookPoint(*STREAMS)
        self.gate_scale = nn.Parameter(torch.zeros(cfg.altup.d_model))
        self.make_per_layer(cfg.per_layer, cfg.per_layer_post)
        self.hook_streams_post, self.hook_resid_post = HookPoint(*STREAMS), HookPoint(*RESIDUAL)

    def forward(self, resid: Wide | Stream, context: Context | None = None) -> Float[Tensor, "batch pos width"]:
        predicted = self.predicted(resid)
        active = predicted[:, :, self.cfg.altup.active]
        normalized = self.ln1(active)
        attn_out = self.attn_out(active, context, normalized)
        laurel_out = self.hook_laurel_out(self.laurel(normalized))
        mid = self.hook_resid_mid((active + attn_out + laurel_out) / 2**0.5)
        activated = self.hook_activated(mid + self.mlp_out(mid))
        corrected = self.hook_corrected(self.corrected(predicted, activated))
        added = self.per_layer_out(self.gate_input(corrected), context)
        streams = torch.cat([corrected[:, :, :1], corrected[:, :, 1:] + added[:, :, None]], 2)
        return self.with_active(self.hook_resid_post, self.hook_streams_post(streams)).flatten(2)

    def wiring(self) -> Wiring:
        return Wiring(by_hand="several streams, each predicted from all, then corrected by what the layer added to one")

    def predicted(self, resid: Wide | Stream) -> Streams:
        """The predictions of all streams, from what enters the layer."""
        cfg = self.cfg.altup
        streams = separated(resid, cfg.n_streams, cfg.d_model) if self.cfg.split is None else self.split(resid)
        streams = self.with_active(self.hook_resid_pre, self.hook_streams_pre(streams))
        coefs = self.hook_predict_coefs(self.altup.predict_coefs(streams[:, :, cfg.active]))
        return self.hook_predicted(coefs @ streams + streams)

    def attn_stream(self, resid: Wide | Stream) -> Stream:
        """The prediction of the active stream, which attention reads."""
        return self.predicted(resid)[:, :, self.cfg.altup.active]

    def corrected(self, predicted: Streams, activated: Stream) -> Streams:
        """All streams after the layer, but for the per-layer embedding."""
        coefs = self.hook_correct_coefs(self.altup.correct_coefs(activated))
        change = activated - predicted[:, :, self.cfg.altup.active]
        return change[:, :, None] * coefs[..., None] + predicted

    def gate_input(self, corrected: Streams) -> Stream:
        """What the gate of the per-layer embedding reads."""
        active = corrected[:, :, self.cfg.altup.active]
        return active * self.gate_scale if self.cfg.scales_gate else active

    def with_active(self, point: HookPoint, streams: Streams) -> Streams:
        """The streams after the active one has passed a point."""
        if not is_listening(point):
            return streams
        active = self.cfg.altup.active
        return torch.cat(
            [streams[:, :, :active], point(streams[:, :, active])[:, :, None], streams[:, :, active + 1 :]], 2
        )
