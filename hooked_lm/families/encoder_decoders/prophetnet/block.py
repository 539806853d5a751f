"""A decoder that predicts several tokens (ProphetNet, Qi et al. 2020, arXiv:2001.04063): its block between streams, and the
beginnings of the streams."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.blocks.cross import PostNormCrossBlock
from hooked_lm.components.blocks.wiring import NORMALIZED_POST, POST, InStream, Wiring
from hooked_lm.components.norms.norm import norm_unhooked
from hooked_lm.components.stack_context import StackContext
from hooked_lm.components.streams import STREAMS, Stream, Streams, StreamsBlock, Wide, separated
from hooked_lm.families.encoder_decoders.prophetnet.attention import (
    MainAttention,
    MainCrossAttention,
    PredictingAttention,
    StreamAttention,
    StreamCrossAttention,
)
from hooked_lm.hooks import HookPoint, is_listening


class NgramEmbed(nn.Module):
    """The streams before the first layer: the stream of the tokens, and the predicting ones, which do not read the tokens.

    Stream n of the predicting ones starts as the norm of a row of `W_ngram` [stream, d_model], the one before n (before the first
    the last), plus the vector of the next position. `hook_out` is that sum, of all predicting streams.
    """

    axes = {"W_ngram": "[stream] d_model"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_predicting: int

        def build(self) -> "NgramEmbed":
            return NgramEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_ngram = nn.Parameter(torch.empty(cfg.n_predicting, cfg.d_model))
        self.hook_out = HookPoint(*STREAMS)

    def forward(self, main: Stream, next_positions: Float[Tensor, "#batch pos d_model"], norm: nn.Module) -> Wide:
        """The streams side by side; `next_positions` are the vectors of the next positions, `norm` is that of embeddings."""
        vectors = next_positions[:, :, None] + self.W_ngram.roll(1, 0)
        predicting = norm_unhooked(norm, self.hook_out(vectors.expand(len(main), -1, -1, -1).contiguous()))
        return torch.cat([main[:, :, None], predicting], 2).flatten(2)


class NgramBlock(StreamsBlock, PostNormCrossBlock):
    """A layer of a `PostNormCrossBlock` for the main stream, and one for each predicting stream, with the same weights.

    Sites of the layer are those of the main stream; `predicting.{n}` has those of a predicting stream. `hook_streams_pre` and
    `hook_streams_post` are all streams, the main one first; an edit of one is an edit of both. The `last` layer returns the first
    predicting stream, which the logits are computed from. So the main stream acts by its keys and values only, and the other
    predicting streams have no effect on the logits.
    """

    @dataclass(frozen=True)
    class Config(PostNormCrossBlock.Config):
        attn: MainAttention.Config
        cross_attn: MainCrossAttention.Config = field(kw_only=True)
        n_predicting: int = field(kw_only=True)
        last: bool = False

        def build(self, layer: int) -> "NgramBlock":
            return NgramBlock(self, layer)

        def predicting(self, stream: int) -> PostNormCrossBlock.Config:
            """The layer of a predicting stream."""
            attn = PredictingAttention.Config(**vars(self.attn), stream=stream)
            parts = {name: getattr(self, name) for name in PostNormCrossBlock.Config.__dataclass_fields__}
            cross_attn = StreamCrossAttention.Config(**vars(self.cross_attn))
            return PostNormCrossBlock.Config(**{**parts, "attn": attn, "cross_attn": cross_attn})

    cfg: Config
    with_weights = ("attn", "ln1", "cross_attn", "ln2", "mlp", "ln3")

    @property
    def shared_within(self) -> Iterator[tuple[str, str]]:
        """Each part of a predicting stream, with that of the main stream whose weights it shares."""
        for stream, part in product(range(self.cfg.n_predicting), self.with_weights):
            yield f"predicting.{stream}.{part}", part

    def make_parts(self) -> None:
        self.hook_streams_pre = HookPoint(*STREAMS)
        self.move_to_end("hook_resid_pre")
        super().make_parts()
        streams = range(self.cfg.n_predicting)
        self.predicting = nn.ModuleList(self.cfg.predicting(stream).build(self.layer) for stream in streams)
        self.hook_streams_post = HookPoint(*STREAMS)

    def forward(self, resid: Wide, context: StackContext) -> Float[Tensor, "batch pos width"]:
        streams = self.entering(resid)
        together = self.settings.fused and not is_listening(*self.points_of_streams)
        after = self.hook_streams_post((self.together if together else self.one_by_one)(streams, context))
        return after[:, :, 1] if self.cfg.last else after.flatten(2)

    def wiring(self) -> Wiring:
        by_hand = "steps are of the main stream; those of the predicting ones, with the same weights, are in predicting"
        first = InStream("predicting.0.ln3", f"predicting.0.{POST}", f"predicting.0.{NORMALIZED_POST}")
        return Wiring((*super().wiring().steps, *([first] if self.cfg.last else [])), by_hand)

    def one_by_one(self, streams: Streams, context: StackContext) -> Streams:
        """The streams after the layer, each computed with its sites."""
        main, *others = streams.unbind(2)
        after = [super().forward(main, context)]
        after += [block(stream, context) for block, stream in zip(self.predicting, others, strict=True)]
        return torch.stack(after, 2)

    def together(self, streams: Streams, context: StackContext) -> Streams:
        """The streams after the layer, with each weight read once; only while nothing listens to one of them."""
        attn, *predicting = self.attns
        attn_out = attn.of_streams(streams, predicting, context, self.layer)
        x = self.ln1(streams.flatten(1, 2) + self.attn_to_stream(attn_out.flatten(1, 2)))
        x = self.ln2(x + self.apply_cross_attn(x, context))
        return self.ln3(x + self.apply_mlp(x)).unflatten(1, streams.shape[1:3])

    @property
    def attns(self) -> list[StreamAttention]:
        """The attention of each stream, that of the main one first."""
        attns = [self.attn, *(block.attn for block in self.predicting)]
        return [attn for attn in attns if isinstance(attn, StreamAttention)]

    @property
    def points_of_streams(self) -> tuple[HookPoint, ...]:
        """All sites of the layer but those of all streams."""
        of_all = (self.hook_streams_pre, self.hook_streams_post)
        return tuple(m for m in self.modules() if isinstance(m, HookPoint) and m not in of_all)

    def entering(self, resid: Wide) -> Streams:
        """The streams before the layer."""
        return self.hook_streams_pre(separated(resid, 1 + self.cfg.n_predicting, self.cfg.attn.d_model))

    def attn_stream(self, resid: Wide) -> Stream:
        """The main stream."""
        return self.entering(resid)[:, :, 0]
