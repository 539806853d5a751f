"""Self-attention of a decoder that predicts several tokens (ProphetNet, Qi et al. 2020, arXiv:2001.04063): the main stream
attends to its own keys, each predicting stream to those of the main stream and to one key of its own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.attention.cross import AbstractCrossAttention, CrossAttention
from hooked_lm.components.attention.multihead import (
    KEY,
    QUERY,
    SCORES,
    AbstractAttention,
    Mixed,
    PerHead,
    SelfAttention,
    Stream,
    fused,
    project,
)
from hooked_lm.components.attention.projection import add_projections, projection
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.attention.steps import Scores, mixed, products, softmax
from hooked_lm.components.context import Context, KeysValues
from hooked_lm.components.stack_context import StackContext
from hooked_lm.hooks import HookPoint, hook_if_listening

OWN = (*SCORES[:3], "1")

Streams = Float[Tensor, "batch pos stream d_model"]
ByBucket = Float[Tensor, "batch pos head bucket"]


class StreamAttention(SelfAttention, ABC):
    """Attention of a stream, with a bias that is a linear function of the query's input: `(x W_rel + b_rel)[bucket]`.

    `W_rel` is [head, d_model, bucket] and `hook_bucket_bias` [batch, pos, head, bucket]; buckets of distances are those of
    `RelativeBias`.
    """

    axes = {"W_rel": "head [d_model] bucket"}
    ahead = 0  # how many positions further than its tokens the stream is

    def __init__(self, cfg: "MainAttention.Config") -> None:
        super().__init__()
        self.cfg = cfg
        add_projections(self, cfg, cfg.d_model)
        self.W_rel = projection(cfg.n_heads, cfg.d_model, cfg.buckets.n_buckets)
        self.b_rel = nn.Parameter(torch.zeros(cfg.n_heads, cfg.buckets.n_buckets))
        self.q_norm = self.k_norm = None  # attributes of the public interface
        self.hook_q, self.hook_k, self.hook_v = HookPoint(*QUERY), HookPoint(*KEY), HookPoint(*KEY)
        self.hook_bucket_bias = HookPoint(*QUERY[:-1], "bucket")
        self.make_mixing(cfg.d_head)

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch key_row *key_head d_model"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_model"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """The three inputs are the stream, or one copy of it per head; by default all are the first."""
        context = context or Context(query_input.shape[1], query_input.device)
        q = self.hook_q(project(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(project(query_input if key_input is None else key_input, self.W_K, self.b_K))
        v = self.hook_v(project(query_input if value_input is None else value_input, self.W_V, self.b_V))
        by_bucket = self.hook_bucket_bias(project(query_input, self.W_rel, self.b_rel))
        return self.output(self.hook_z(self.attend(q, (k, v), by_bucket, context, layer)))

    def of_streams(
        self, streams: Streams, predicting: Sequence["StreamAttention"], context: Context, layer: int
    ) -> Streams:
        """The outputs for the main stream and the predicting ones together, without sites: each weight is read once."""
        weights = [(self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V), (self.W_rel, self.b_rel)]
        by_stream = [project(streams.flatten(1, 2), *weight).unflatten(1, streams.shape[1:3]) for weight in weights]
        z = [
            attn.attend(q, (k, v), by_bucket, context, layer)
            for attn, q, k, v, by_bucket in zip((self, *predicting), *(x.unbind(2) for x in by_stream), strict=True)
        ]
        return self.output(torch.stack(z, 2).flatten(1, 2)).unflatten(1, streams.shape[1:3])

    @abstractmethod
    def attend(self, q: PerHead, new: KeysValues, by_bucket: ByBucket, context: Context, layer: int) -> Mixed:
        """The mixed values; `new` are the keys and values of the new tokens."""

    def bias(self, by_bucket: ByBucket, context: Context) -> Scores:
        """The bias of the scores, with the mask."""
        by_query, buckets = by_bucket.transpose(1, 2), context.once(self.cfg, lambda: self.buckets(context))
        index = buckets[:, None].expand(*by_query.shape[:2], -1, -1)
        return by_query.gather(-1, index).masked_fill(~self.visible(context), float("-inf"))

    def buckets(self, context: Context) -> Int[Tensor, "#batch query_pos key_pos"]:
        """The bucket of each distance."""
        return self.cfg.buckets.of(context.key_positions[:, None] - context.positions[:, :, None] - self.ahead)

    @abstractmethod
    def visible(self, context: Context) -> Bool[Tensor, "#batch 1 query_pos key_pos"]:
        """Which keys of the main stream a query attends to."""


class MainAttention(StreamAttention):
    """`z = softmax(q k^T * scale + bias + mask) v`; the keys and values are kept for the predicting streams of the layer."""

    @dataclass(frozen=True)
    class Config(AbstractAttention.Config):
        d_model: int
        n_heads: int
        d_head: int
        buckets: RelativeBias.Config
        scale: float | None = None  # of the scores; None: d_head ** -0.5
        qkv_bias: bool = True
        out_bias: bool = True
        rotary = None

        def build(self) -> StreamAttention:
            return MainAttention(self)

    def attend(self, q: PerHead, new: KeysValues, by_bucket: ByBucket, context: Context, layer: int) -> Mixed:
        """The mixed values; `new` are the keys and values of the new tokens."""
        k, v = context.update_kv(layer, *new)
        context.keep_kv(layer, k, v)
        bias = self.bias(by_bucket, context)
        if self.may_fuse(self.hook_attn_scores, self.hook_pattern):
            return fused(q, k, v, bias, self.scale)
        shown = self.hook_attn_scores(products(q, k) * self.scale + bias)
        return mixed(self.hook_pattern(softmax(shown, None).to(v.dtype)), v)

    def visible(self, context: Context) -> Bool[Tensor, "#batch 1 query_pos key_pos"]:
        """Which keys of the main stream a query attends to."""
        return context.full_mask(True, None)


class PredictingAttention(StreamAttention):
    """The attention of a predicting stream: one softmax over keys of the main stream and the key of the same position and stream.

    The stream numbered n predicts the next token from tokens that are at least n positions before it, and the first of the text.
    `hook_attn_scores` and `hook_pattern` are the columns of the main stream, [batch, head, query_pos, key_pos],
    `hook_attn_scores_own` and `hook_pattern_own`, [batch, head, query_pos, 1], those of the own key. `hook_k` and `hook_v` are
    own keys and values, of new tokens only; those of the main stream have sites there.
    """

    ahead = 1

    @dataclass(frozen=True)
    class Config(MainAttention.Config):
        stream: int = 0

        def build(self) -> "PredictingAttention":
            return PredictingAttention(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.hook_attn_scores_own, self.hook_pattern_own = HookPoint(*OWN), HookPoint(*OWN)
        for name in ("hook_pattern", "hook_pattern_own", "hook_z", "hook_result"):  # in the order of computation
            self._modules[name] = self._modules.pop(name)

    def attend(self, q: PerHead, new: KeysValues, by_bucket: ByBucket, context: Context, layer: int) -> Mixed:
        """The mixed values; `new` are the keys and values of the new tokens."""
        of_main = context.kv_of(layer)
        assert of_main is not None, "a predicting stream without the main stream"
        (k, v), (own_k, own_v) = of_main, new
        shown = self.hook_attn_scores(products(q, k) * self.scale + self.bias(by_bucket, context))
        of_own = (q * own_k).sum(-1, keepdim=True) * self.scale + by_bucket[..., :1]  # the first bucket: distance 0
        own = self.hook_attn_scores_own(of_own.transpose(1, 2))
        pattern = softmax(torch.cat([shown, own], -1), None).to(v.dtype)
        shown, own = self.hook_pattern(pattern[..., :-1]), self.hook_pattern_own(pattern[..., -1:])
        return mixed(shown, v) + own.transpose(1, 2) * own_v

    def visible(self, context: Context) -> Bool[Tensor, "#batch 1 query_pos key_pos"]:
        """Which keys of the main stream a query attends to."""
        far = context.positions[:, :, None] - context.key_positions[:, None]
        seen = (far >= self.cfg.stream) | (context.key_positions[:, None] == 0)
        return (seen if context.real is None else seen & context.real[:, None])[:, None]


class MainCrossAttention(CrossAttention):
    """Cross attention that keeps its keys and values for the predicting streams of the layer."""

    @dataclass(frozen=True)
    class Config(CrossAttention.Config):
        def build(self) -> "MainCrossAttention":
            return MainCrossAttention(self)

    def keep(self, k: Tensor, v: Tensor, context: StackContext, layer: int) -> None:
        """Keeps keys and values in the context."""
        context.keep_rows("source keys", layer, k)
        context.keep_rows("source values", layer, v)


class StreamCrossAttention(AbstractCrossAttention):
    """The cross attention of a predicting stream, to the keys and values that the main stream computes from the source.

    Edits of `hook_k` and `hook_v` affect this stream only.
    """

    @dataclass(frozen=True)
    class Config(CrossAttention.Config):
        def build(self) -> "StreamCrossAttention":
            return StreamCrossAttention(self)

    def source_kv(self, context: StackContext, layer: int) -> KeysValues:
        """The keys and values of the context's source, at the sites of this stream."""
        k, v = context.rows_of("source keys", layer), context.rows_of("source values", layer)
        assert k is not None, "a predicting stream without the main stream"
        assert v is not None, "a predicting stream without the main stream"
        return hook_if_listening(self.hook_k, k), hook_if_listening(self.hook_v, v)
