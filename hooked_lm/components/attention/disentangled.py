"""Disentangled attention (He et al. 2020, arXiv:2006.03654): scores of content with content, content with relative
position, and relative position with content."""

from copy import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import (
    KEY,
    QUERY,
    SCORES,
    Attend,
    Keys,
    Mixed,
    PerHead,
    Stream,
    Values,
    project,
    projection,
)
from hooked_lm.components.attention.position_bias import SharedBias
from hooked_lm.components.context import Context
from hooked_lm.components.stack_context import StackContext
from hooked_lm.hooks import HookPoint

Table = Float[Tensor, "distance d_model"]


class RelativeEmbed(nn.Module):
    """A learned vector for each relative position, `W_rel` [distance, d_model], perhaps normalised; all layers read it.

    Row `span` is that of distance 0. With `n_buckets` (then the span) short distances have a row of their own, and longer
    ones share rows that widen geometrically up to `max_distance`.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        max_distance: int
        n_buckets: int | None = None
        norm_eps: float | None = None  # of its layer norm; None: it has none

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
        """The row of the table for each query and key."""
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
    """The context of layers that share a table of relative positions, and which row of it is for which query and key."""

    table: Table
    rows: Int[Tensor, "query_pos key_pos"]


class DisentangledAttention(Attend):
    """`z = softmax((q k^T + c2p + p2c) * scale + mask) v`, and `W_O` back into the stream.

    With the table's row of each query and key, `c2p` is q with that row's key (by `W_pos_K`), and `p2c` that row's query
    (by `W_pos_Q`) with k. `shared` takes `W_K` and `W_Q` for the table too. The sites `hook_c2p` and `hook_p2c` show what
    each adds to the scores, scale included. `scale` is that of all three.
    """

    @dataclass(frozen=True)
    class Config:
        d_model: int
        n_heads: int
        d_head: int
        scale: float
        c2p: bool = True
        p2c: bool = True
        shared: bool = False

        causal: ClassVar[bool] = False
        # what the flat names of a model ask every attention for
        n_key_value_heads: ClassVar[None] = None
        rotary: ClassVar[None] = None
        qk_norm: ClassVar[None] = None
        window: ClassVar[None] = None
        soft_cap: ClassVar[None] = None
        position_bias: ClassVar[None] = None
        sinks: ClassVar[bool] = False
        clip: ClassVar[None] = None

        @property
        def n_kv(self) -> int:
            return self.n_heads

        def build(self) -> "DisentangledAttention":
            return DisentangledAttention(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, self.n_kv, self.ungrouped = cfg, cfg.n_heads, False
        sizes = (cfg.n_heads, cfg.d_model, cfg.d_head)
        self.W_Q, self.W_K, self.W_V = projection(*sizes), projection(*sizes), projection(*sizes)
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)) for _ in range(3))
        self.hook_q, self.hook_k, self.hook_v = HookPoint(*QUERY), HookPoint(*KEY), HookPoint(*KEY)
        if cfg.c2p:
            self.hook_c2p = HookPoint(*SCORES)
        if cfg.p2c:
            self.hook_p2c = HookPoint(*SCORES)
        if cfg.c2p and not cfg.shared:
            self.W_pos_K = projection(*sizes)
            self.b_pos_K = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head))
        if cfg.p2c and not cfg.shared:
            self.W_pos_Q = projection(*sizes)
            self.b_pos_Q = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head))
        self.make_mixing(
            cfg.n_heads,
            cfg.d_head,
            cfg.d_model,
            scale=cfg.scale,
            out_bias=True,
            causal=False,
            position_bias=SharedBias() if cfg.c2p or cfg.p2c else None,
        )

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch pos *key_head d_model"],
        value_input: Float[Tensor, "batch pos *value_head d_model"],
        context: Context,
        layer: int = 0,
    ) -> Stream:
        """The three inputs are the stream, or one copy of it per head."""
        q = self.hook_q(project(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(project(key_input, self.W_K, self.b_K))
        v = self.hook_v(project(value_input, self.W_V, self.b_V))
        return self.output(self.mix(q, k, v, context))

    def mix(self, q: PerHead, k: Keys, v: Values, context: Context, layer: int = 0) -> Mixed:
        """Mixed values, at their site."""
        if self.position_bias is None:
            return super().mix(q, k, v, context)
        assert isinstance(context, RelativeContext), "only a stack of layers shares a table"
        own = copy(context)  # what is added to the scores is this layer's alone
        own.score_bias = self.position_scores(q, k, context)
        return super().mix(q, k, v, own)

    def position_scores(self, q: PerHead, k: Keys, context: RelativeContext) -> Float[Tensor, "batch head query key"]:
        """What relative positions add to the scores."""
        table, rows = context.table[None], context.rows
        parts = []
        if self.cfg.c2p:
            of_rows = project(table, *self.position_weights("K"))[0]
            scores = torch.einsum("bqnh,dnh->bnqd", q, of_rows) * self.scale
            parts.append(self.hook_c2p(scores.gather(3, rows.expand(*scores.shape[:2], -1, -1))))
        if self.cfg.p2c:
            of_rows = project(table, *self.position_weights("Q"))[0]
            scores = torch.einsum("bknh,dnh->bnkd", k, of_rows) * self.scale
            found = scores.gather(3, rows.T.expand(*scores.shape[:2], -1, -1))
            parts.append(self.hook_p2c(found.transpose(2, 3)))
        return sum(parts[1:], parts[0])

    def position_weights(self, name: str) -> tuple[Tensor, Tensor]:
        """Weight and bias that make keys or queries of the table."""
        prefix = "" if self.cfg.shared else "pos_"
        return getattr(self, f"W_{prefix}{name}"), getattr(self, f"b_{prefix}{name}")
