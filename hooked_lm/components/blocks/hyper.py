"""A block between several residual streams, with hyper-connections (Zhu et al. 2024, arXiv:2409.19606), as in Hy4 (Tencent
2026) and DeepSeek-V4 (DeepSeek-AI 2026)."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.blocks.block import AttentionPart, MLPPart, Stream
from hooked_lm.components.blocks.streams import Streams, StreamsBlock
from hooked_lm.components.blocks.wiring import Wiring
from hooked_lm.components.context import Context
from hooked_lm.components.experts.hash_moe import HashMoE
from hooked_lm.components.hyper_connection import HyperConnection
from hooked_lm.components.norms.norm import RESIDUAL, upcast
from hooked_lm.components.streams import STREAMS, Wide, separated
from hooked_lm.hooks import HookPoint, hook_if_listening, is_listening


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
        return self.mlp_out(x)

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


class HashHyperBlock(HyperBlock):
    """A `HyperBlock` whose experts are chosen by the ids of the tokens, `hook_per_layer_in`."""

    @dataclass(frozen=True)
    class Config(HyperBlock.Config):
        mlp: HashMoE.Config = field(kw_only=True)

        def build(self, layer: int) -> "HashHyperBlock":
            return HashHyperBlock(self, layer)

    cfg: Config
    mlp: HashMoE

    def make_mlp(self) -> None:
        self.hook_per_layer_in = HookPoint("batch", "pos", "1")
        super().make_mlp()

    def mlp_out_of(self, x: Stream, context: Context | None) -> Stream:
        """The output of the experts to the streams; ValueError if the context has no token ids."""
        ids = None if context is None else context.per_layer_input(self.layer)
        if ids is None:
            raise ValueError(
                f"layer {self.layer} chooses experts by token ids: pass tokens=... with the residual stream"
            )
        ids = self.hook_per_layer_in(ids)
        return self.hook_mlp_out(self.mlp(self.ln2(hook_if_listening(self.hook_mlp_in, x)), ids))


def written(streams: Streams, out: Stream, write: Float[Tensor, "batch pos stream"]) -> Streams:
    """The streams, each plus its part of an output; in at least fp32."""
    return write[..., None] * upcast(out)[:, :, None] + upcast(streams)


def with_mean(point: HookPoint, streams: Streams) -> Streams:
    """The streams after their mean has passed a point, whose change is added to each."""
    if not is_listening(point):
        return streams
    mean = streams.mean(2)
    return streams + (point(mean) - mean)[:, :, None]
