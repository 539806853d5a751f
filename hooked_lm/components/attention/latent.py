"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys and values of all heads come from one small vector.

The names are the paper's: D is the way down to a latent, U the way up to the heads, R the part that turns with position.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import QUERY, PerHead, SelfAttention, Stream, project, projection
from hooked_lm.components.context import Context
from hooked_lm.components.norm import RMSNorm, norm_unhooked
from hooked_lm.components.rotary import Rotary
from hooked_lm.hooks import HookPoint, is_listening

Latent = Float[Tensor, "batch pos *head d_latent"]


class LatentAttention(SelfAttention):
    """Attention whose keys and values are `c W_UK` and `c W_UV` with the latent `c = norm(x W_DKV)`.

    A head's query and key have a part of `d_nope` features that does not turn with position and one of `rotary.dim`
    that does; the turning part of the key is `x W_KR`, the same for all heads. Queries are `x W_Q`, or by way of a
    latent of their own, `norm(x W_DQ) W_UQ`. `W_DKV`, `W_KR` and `W_DQ` are [d_model, d_latent], the others
    [head, ..., d_head]. `hook_q_latent` and `hook_kv_latent` stand before the norms.
    """

    of_keys = ("hook_k", "hook_v", "hook_rot_k", "hook_kv_latent", "kv_norm", "W_DKV", "W_UK", "W_UV", "W_KR")

    @dataclass(frozen=True)
    class Config:
        """`down_bias` gives biases to the ways down."""

        d_model: int
        n_heads: int
        d_nope: int
        d_value: int
        d_kv_latent: int
        rotary: Rotary
        d_q_latent: int | None = None
        scale: float | None = None  # of the scores; None: d_head ** -0.5
        latent_eps: float = 1e-6
        down_bias: bool = False
        out_bias: bool = False
        causal: bool = True
        # what the flat names of a model ask every attention for
        n_key_value_heads: ClassVar[None] = None
        qk_norm: ClassVar[None] = None
        window: ClassVar[None] = None
        soft_cap: ClassVar[None] = None
        position_bias: ClassVar[None] = None
        sinks: ClassVar[bool] = False
        clip: ClassVar[None] = None

        @property
        def d_head(self) -> int:
            return self.d_nope + self.rotary.dim

        @property
        def n_kv(self) -> int:
            return self.n_heads

        def build(self) -> "LatentAttention":
            return LatentAttention(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.n_kv, self.ungrouped = cfg.n_heads, False
        if cfg.d_q_latent is None:
            self.W_Q = projection(cfg.n_heads, cfg.d_model, cfg.d_head)
        else:
            self.W_DQ = nn.Parameter(torch.empty(cfg.d_model, cfg.d_q_latent))
            self.b_DQ = nn.Parameter(torch.zeros(cfg.d_q_latent)) if cfg.down_bias else None
            self.hook_q_latent = HookPoint("batch", "pos", "d_q_latent")
            dims = ("batch", "pos", "d_q_latent")
            self.q_norm = RMSNorm.Config(cfg.d_q_latent, cfg.latent_eps).build(dims)
            self.W_UQ = projection(cfg.n_heads, cfg.d_q_latent, cfg.d_head)
        self.hook_q = HookPoint(*QUERY)
        self.W_DKV = nn.Parameter(torch.empty(cfg.d_model, cfg.d_kv_latent))
        self.W_KR = nn.Parameter(torch.empty(cfg.d_model, cfg.rotary.dim))
        self.b_DKV = nn.Parameter(torch.zeros(cfg.d_kv_latent)) if cfg.down_bias else None
        self.b_KR = nn.Parameter(torch.zeros(cfg.rotary.dim)) if cfg.down_bias else None
        self.hook_kv_latent = HookPoint("batch", "pos", "d_kv_latent")
        self.kv_norm = RMSNorm.Config(cfg.d_kv_latent, cfg.latent_eps).build(("batch", "pos", "d_kv_latent"))
        self.W_UK = projection(cfg.n_heads, cfg.d_kv_latent, cfg.d_nope)
        self.W_UV = projection(cfg.n_heads, cfg.d_kv_latent, cfg.d_value)
        self.hook_k = HookPoint(*QUERY)
        self.hook_v = HookPoint(*QUERY[:-1], "d_value")
        self.hook_rot_q, self.hook_rot_k = HookPoint(*QUERY), HookPoint(*QUERY)
        self.make_mixing(
            cfg.n_heads,
            cfg.d_value,
            cfg.d_model,
            scale=cfg.d_head**-0.5 if cfg.scale is None else cfg.scale,
            out_bias=cfg.out_bias,
            causal=cfg.causal,
        )
        self.hook_z = HookPoint(*QUERY[:-1], "d_value")

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch key_row *key_head d_model"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_model"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """The three inputs are the normalised stream, or one copy of it per head; by default all the same."""
        context = context or Context(query_input.shape[1], query_input.device)
        key_input = query_input if key_input is None else key_input
        value_input = key_input if value_input is None else value_input
        angles = context.key_angles(self.cfg.rotary)
        q = self.hook_q(self.queries(query_input))
        latent = self.latent(key_input)
        if is_listening(self.hook_k):
            k = self.turned(self.hook_k(self.keys(key_input, latent)), angles)
        else:
            k = self.keys(key_input, latent, angles)
        v = self.hook_v(project(latent if value_input is key_input else self.unseen(value_input), self.W_UV, None))
        q = self.hook_rot_q(self.turned(q, context.query_angles(self.cfg.rotary)))
        k, v = context.update_kv(layer, self.hook_rot_k(k), v)
        return self.output(self.mix(q, k, v, context, layer))

    def latent(self, x: Float[Tensor, "batch pos *head d_model"]) -> Latent:
        """What keys and values are made of."""
        return _normalised(F.linear(x, self.W_DKV.T, self.b_DKV), self.hook_kv_latent, self.kv_norm)

    def unseen(self, x: Float[Tensor, "batch pos *head d_model"]) -> Latent:
        """The same for values that read another stream than keys do, past the sites, which are those of the keys."""
        return norm_unhooked(self.kv_norm, F.linear(x, self.W_DKV.T, self.b_DKV))

    def queries(self, x: Float[Tensor, "batch pos *head d_model"]) -> PerHead:
        """Before they turn."""
        if self.cfg.d_q_latent is None:
            return project(x, self.W_Q, None)
        latent = _normalised(F.linear(x, self.W_DQ.T, self.b_DQ), self.hook_q_latent, self.q_norm)
        return project(latent, self.W_UQ, None)

    def keys(
        self, x: Float[Tensor, "batch pos *head d_model"], latent: Latent, angles: tuple[Tensor, Tensor] | None = None
    ) -> PerHead:
        """Before they turn; with angles after it: what the heads share is then turned once for all."""
        still, turning = project(latent, self.W_UK, None), F.linear(x, self.W_KR.T, self.b_KR)
        turning = turning[:, :, None] if x.ndim == 3 else turning
        if angles is not None:
            turning = self.cfg.rotary.rotate(turning, angles)
        return torch.cat([still, turning.expand(-1, -1, still.shape[2], -1)], -1)

    def turned(self, x: PerHead, angles: tuple[Tensor, Tensor]) -> PerHead:
        """The same vectors, their last features turned by position."""
        still, turning = x[..., : self.cfg.d_nope], x[..., self.cfg.d_nope :]
        return torch.cat([still, self.cfg.rotary.rotate(turning, angles)], -1)


def _normalised(down: Latent, point: nn.Module, norm: nn.Module) -> Latent:
    """A latent at its site and through its norm. Of one copy per head the sites show the mean; an edit reaches all."""
    if down.ndim == 3:
        return norm(point(down))
    mean = down.mean(2)
    shown = point(mean)
    edited_behind = norm(shown) - norm_unhooked(norm, shown)
    return norm_unhooked(norm, down + (shown - mean)[:, :, None]) + edited_behind[:, :, None]
