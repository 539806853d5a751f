"""Disentangled attention (He et al. 2020, arXiv:2006.03654): its scores are content-to-content, content-to-position and
position-to-content."""

from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import (
    KEY,
    QUERY,
    SCORES,
    AbstractAttention,
    Keys,
    PerHead,
    Stream,
    Values,
    project,
)
from hooked_lm.components.attention.position_bias import SharedBias
from hooked_lm.components.attention.projection import projection
from hooked_lm.components.context import Context
from hooked_lm.components.stack_context import StackContext
from hooked_lm.hooks import HookPoint

Table = Float[Tensor, "distance d_model"]


class RelativeEmbed(nn.Module):
    """A learned vector for each relative position, `W_rel` [distance, d_model], shared by all layers, optionally normalised.

    Distance 0 is row `span`. With `n_buckets`, which is then the span, short distances have one row each; longer ones share
    rows, in buckets that widen geometrically up to `max_distance`.
    """

    axes = {"W_rel": "[distance] d_position"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        max_distance: int
        n_buckets: int | None = None
        norm_eps: float | None = None  # of the layer norm; None: no norm

        @property
        def span(self) -> int:
            return self.n_buckets or self.max_distance

        def build(self) -> "RelativeEmbed":
            return RelativeEmbed(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        has_norm = cfg.norm_eps is not None
        self.W_rel = nn.Parameter(torch.empty(2 * cfg.span, cfg.d_model))
        self.w = nn.Parameter(torch.ones(cfg.d_model)) if has_norm else None
        self.b = nn.Parameter(torch.zeros(cfg.d_model)) if has_norm else None

    def forward(self) -> Table:
        if self.cfg.norm_eps is None:
            return self.W_rel
        return F.layer_norm(self.W_rel, (self.cfg.d_model,), self.w, self.b, self.cfg.norm_eps)

    def rows(self, n_pos: int, device: torch.device) -> Int[Tensor, "query_pos key_pos"]:
        """The row of `W_rel` for each query and key."""
        positions = torch.arange(n_pos, device=device)
        distance, span = positions[:, None] - positions, self.cfg.span
        if self.cfg.n_buckets is not None:
            half = self.cfg.n_buckets // 2
            far = distance.abs().clamp(min=half - 1).float()
            growth = torch.log(far / half) / torch.log(torch.tensor((self.cfg.max_distance - 1) / half))
            shared = torch.ceil(growth * (half - 1)) + half
            distance = torch.where(far <= half, distance, (shared * distance.sign()).long())
        return (distance + span).clamp(0, 2 * span - 1)


class RelativeContext(StackContext):
    """A context with the table of relative positions, and its row for each query and key."""

    table: Table
    rows: Int[Tensor, "query_pos key_pos"]


class DisentangledAttention(AbstractAttention):
    """`z = softmax((q k^T + c2p + p2c) * scale + mask) v`, then `W_O`.

    `c2p` is the product of q with the key of the table's row for that query and key (by `W_pos_K`), `p2c` that of the row's
    query (by `W_pos_Q`) with k. With `shared` these are `W_K` and `W_Q`. Without `key_bias` neither kind of key has a bias.
    The sites `hook_c2p` and `hook_p2c` are the terms of the scores, times `scale`.
    """

    axes = dict.fromkeys(("W_pos_Q", "W_pos_K"), "head [d_position] d_head")

    @dataclass(frozen=True)
    class Config(AbstractAttention.Config):
        d_model: int
        n_heads: int
        d_head: int
        scale: float
        c2p: bool = True
        p2c: bool = True
        shared: bool = False
        key_bias: bool = True
        causal, out_bias, rotary = False, True, None

        def build(self) -> "DisentangledAttention":
            return DisentangledAttention(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        sizes = (cfg.n_heads, cfg.d_model, cfg.d_head)
        self.W_Q, self.W_K, self.W_V = projection(*sizes), projection(*sizes), projection(*sizes)
        self.b_Q, self.b_V = (nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)) for _ in range(2))
        self.b_K = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)) if cfg.key_bias else None
        self.hook_q, self.hook_k, self.hook_v = HookPoint(*QUERY), HookPoint(*KEY), HookPoint(*KEY)
        if cfg.c2p:
            self.hook_c2p = HookPoint(*SCORES)
        if cfg.p2c:
            self.hook_p2c = HookPoint(*SCORES)
        if cfg.c2p and not cfg.shared:
            self.W_pos_K = projection(*sizes)
            self.b_pos_K = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)) if cfg.key_bias else None
        if cfg.p2c and not cfg.shared:
            self.W_pos_Q = projection(*sizes)
            self.b_pos_Q = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head))
        self.make_mixing(cfg.d_head)
        self.position_bias = SharedBias() if cfg.c2p or cfg.p2c else None

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch pos *key_head d_model"],
        value_input: Float[Tensor, "batch pos *value_head d_model"],
        context: Context,
        layer: int = 0,
    ) -> Stream:
        """Each input is the stream, or one copy of it per head."""
        q = self.hook_q(project(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(project(key_input, self.W_K, self.b_K))
        v = self.hook_v(project(value_input, self.W_V, self.b_V))
        return self.output(self.mix(q, k, v, context))

    def attended(self, q: PerHead, k: Keys, v: Values, context: Context) -> tuple[Keys, Values, Context]:
        """The keys and values, and a context with the terms of the scores that depend on relative positions."""
        if self.position_bias is None:
            return k, v, context
        assert isinstance(context, RelativeContext), "disentangled attention needs the context of a stack"
        layer_context = copy(context)  # the bias is this layer's only
        layer_context.score_bias = self.position_scores(q, k, context)
        return k, v, layer_context

    def position_scores(self, q: PerHead, k: Keys, context: RelativeContext) -> Float[Tensor, "batch head query key"]:
        """The terms of the scores that depend on relative positions."""
        table, rows = context.table[None], context.rows
        terms = []
        if self.cfg.c2p:
            keys = project(table, *self.position_weights("K"))[0]
            scores = torch.einsum("bqnh,dnh->bnqd", q, keys) * self.scale
            terms.append(self.hook_c2p(scores.gather(3, rows.expand(*scores.shape[:2], -1, -1))))
        if self.cfg.p2c:
            queries = project(table, *self.position_weights("Q"))[0]
            scores = torch.einsum("bknh,dnh->bnkd", k, queries) * self.scale
            scores = scores.gather(3, rows.T.expand(*scores.shape[:2], -1, -1))
            terms.append(self.hook_p2c(scores.mT))
        return sum(terms[1:], terms[0])

    def position_weights(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The weight and bias for the keys (K) or queries (Q) of the table."""
        prefix = "" if self.cfg.shared else "pos_"
        return getattr(self, f"W_{prefix}{name}"), getattr(self, f"b_{prefix}{name}")
