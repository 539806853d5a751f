"""Keys that pool several tokens, as in DeepSeek-V4 (DeepSeek-AI 2026)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.attention.indexer import rotate_last
from hooked_lm.components.attention.multihead import project
from hooked_lm.components.attention.projection import projection
from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.norms.norm import RMSNorm, upcast
from hooked_lm.hooks import HookPoint

Series = Float[Tensor, "batch key_pos series d_head"]
Blocks = Float[Tensor, "batch block d_head"]


class PoolInputs(nn.Module):
    """What a token adds to pooled keys, `x W_K` and the gate `x W_gate`. Weights are [series, d_model, d_head]."""

    axes = dict.fromkeys(("W_K", "W_gate"), "series [d_model] d_head")

    def __init__(self, cfg: "KeyPool.Config", axis: str) -> None:
        super().__init__()
        self.W_K, self.W_gate = (projection(cfg.n_series, cfg.d_model, cfg.d_head) for _ in range(2))
        dims = ("batch", "pos", "series", axis)
        self.hook_pool_k, self.hook_pool_gate = HookPoint(*dims), HookPoint(*dims)

    def forward(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> tuple[Float[Tensor, "batch pos series d_head"], Float[Tensor, "batch pos series d_head"]]:
        return self.hook_pool_k(project(x, self.W_K, None)), self.hook_pool_gate(project(x, self.W_gate, None))


class KeyPool(nn.Module):
    """One key for each block of `rate` tokens: `norm(sum of softmax(gate + b_gate) * k)` over its tokens, for each feature.

    `k` and `gate` are the outputs of `PoolInputs`, `b_gate` [rate, series, d_head] depends on the place in the block. With
    `overlapping` there are two series: a block pools the first of the block before it and the second of its own. Rotary
    applies to the last features, at the position of the first token. Padding belongs to no block. Queries see a block from its
    last token on; an unfinished block is not seen.

    `hook_pooled_k` is before the norm. The sites hold all blocks, also those of past tokens; an edit is of a whole block, and
    sweeps run it as whole forward passes.
    """

    axes = {"b_gate": "rate series d_head"}

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_head: int
        rate: int
        rotary: Rotary
        overlapping: bool = False
        eps: float = 1e-6

        @property
        def n_series(self) -> int:
            """How many keys a token adds to different blocks."""
            return 1 + self.overlapping

        def build(self, axis: str = "d_head") -> "KeyPool":
            return KeyPool(self, axis)

        def build_inputs(self, axis: str = "d_head") -> PoolInputs:
            """The projections of tokens, which are computed before any block is finished."""
            return PoolInputs(self, axis)

    def __init__(self, cfg: Config, axis: str) -> None:
        super().__init__()
        self.cfg, dims = cfg, ("batch", "block", axis)
        self.b_gate = nn.Parameter(torch.zeros(cfg.rate, cfg.n_series, cfg.d_head))
        self.hook_pooled_k = HookPoint(*dims)
        self.norm = RMSNorm.Config(cfg.d_head, cfg.eps).build(dims)
        self.hook_rot_pooled_k = HookPoint(*dims)

    def forward(self, k: Series, gate: Series, context: Context) -> Blocks:
        pooled = self.norm(self.hook_pooled_k(self.pooled(k, gate, context)))
        positions = torch.arange(pooled.shape[1], device=k.device)[None] * self.cfg.rate
        angles = self.cfg.rotary.angles(positions, context.n_key)
        return self.hook_rot_pooled_k(rotate_last(self.cfg.rotary, pooled[:, :, None], angles)[:, :, 0])

    def pooled(self, k: Series, gate: Series, context: Context) -> Blocks:
        """The pooled keys, before their norm."""
        dtype, rate = k.dtype, self.cfg.rate
        n_blocks = k.shape[1] // rate
        if context.real is not None:  # real tokens first
            order = (~context.real).long().argsort(dim=1, stable=True)[:, :, None, None]
            k, gate = k.take_along_dim(order, 1), gate.take_along_dim(order, 1)
        k, gate = (upcast(x[:, : n_blocks * rate]).unflatten(1, (n_blocks, rate)) for x in (k, gate))
        gate = gate + upcast(self.b_gate)
        if self.cfg.overlapping:
            k, gate = _with_block_before(k, 0.0), _with_block_before(gate, float("-inf"))
        else:
            k, gate = k[:, :, :, 0], gate[:, :, :, 0]
        return (gate.softmax(2) * k).sum(2).to(dtype)

    def visible(self, n_blocks: int, context: Context) -> Bool[Tensor, "#batch query_pos block"]:
        """Which blocks each query may attend to: those that end at its token or before."""
        n_seen = (context.positions + 1) // self.cfg.rate
        return torch.arange(n_blocks, device=n_seen.device) < n_seen[:, :, None]


def _with_block_before(
    x: Float[Tensor, "batch block rate 2 d_head"], fill: float
) -> Float[Tensor, "batch block two_rate d_head"]:
    """The first series of the block before each, then the second of its own; the first block has `fill` before it."""
    before = F.pad(x[:, :, :, 0], (0, 0, 0, 0, 1, 0), value=fill)[:, :-1]
    return torch.cat([before, x[:, :, :, 1]], 2)
