"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys and values are projections of one small vector.

Weights are named as in the paper: D projects down to a latent, U up to the heads, R to the rotary features.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import (
    QUERY,
    AbstractAttention,
    Keys,
    Mixed,
    PerHead,
    SelfAttention,
    Stream,
    Values,
    project,
)
from hooked_lm.components.attention.projection import projection
from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.norms.norm import RMSNorm, norm_unhooked
from hooked_lm.hooks import HookPoint, is_listening

KR = ("batch", "pos", "d_shared")

Latent = Float[Tensor, "batch pos *head d_latent"]


class LatentInputs(NamedTuple):
    """The inputs of queries and keys, and what the queries are projections of."""

    query_input: Float[Tensor, "batch pos *head d_model"]
    q_latent: Latent
    key_input: Float[Tensor, "batch key_row *key_head d_model"]


class AbstractLatentAttention(SelfAttention, ABC):
    """Attention to keys and values that are projections of a latent; a kind says which keys its queries attend to."""

    axes = {
        "W_DQ": "[d_model] d_q_latent",
        "W_UQ": "head [d_q_latent] d_head",
        "W_DKV": "[d_model] d_kv_latent",
        "W_KR": "[d_model] d_shared",
        "W_UK": "head [d_kv_latent] d_nope",
        "W_UV": "head [d_kv_latent] d_value",
        "W_O": "[head d_value] d_model",
    }

    key_value_parts: tuple[str, ...] = (
        "hook_k",
        "hook_v",
        "hook_rot_k",
        "hook_kv_latent",
        "kv_norm",
        "hook_kr",
        "kr_norm",
        "W_DKV",
        "W_UK",
        "W_UV",
        "W_KR",
    )

    def __init__(self, cfg: "LatentAttention.Config") -> None:
        super().__init__()
        self.cfg = cfg
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
        self.W_KR = nn.Parameter(torch.empty(cfg.d_model, cfg.n_shared))
        self.b_DKV = nn.Parameter(torch.zeros(cfg.d_kv_latent)) if cfg.down_bias else None
        self.b_KR = nn.Parameter(torch.zeros(cfg.n_shared)) if cfg.down_bias else None
        self.hook_kv_latent = HookPoint("batch", "pos", "d_kv_latent")
        self.kv_norm = RMSNorm.Config(cfg.d_kv_latent, cfg.latent_eps).build(("batch", "pos", "d_kv_latent"))
        if cfg.kr_norm:
            self.hook_kr = HookPoint(*KR)
            self.kr_norm = RMSNorm.Config(cfg.n_shared, cfg.latent_eps).build(KR)
        self.W_UK = projection(cfg.n_heads, cfg.d_kv_latent, cfg.d_nope)
        self.W_UV = projection(cfg.n_heads, cfg.d_kv_latent, cfg.d_value)
        self.hook_k = HookPoint(*QUERY)
        self.hook_v = HookPoint(*QUERY[:-1], "d_value")
        if cfg.rotary is not None:
            self.hook_rot_q, self.hook_rot_k = HookPoint(*QUERY), HookPoint(*QUERY)
        self.make_mixing(cfg.d_value)
        self.hook_z = HookPoint(*QUERY[:-1], "d_value")

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch key_row *key_head d_model"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_model"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """Each input is the normalised stream, or one copy of it per head; the last two default to the one before."""
        context = context or Context(query_input.shape[1], query_input.device)
        key_input = query_input if key_input is None else key_input
        value_input = key_input if value_input is None else value_input
        q_latent = self.q_latent(query_input)
        q = self.hook_q(self.queries(q_latent))
        latent = self.latent(key_input)
        k = self.rotated_keys(key_input, latent, context)
        v = self.hook_v(
            project(latent if value_input is key_input else self.latent_unhooked(value_input), self.W_UV, None)
        )
        if self.cfg.rotary is not None:
            q = self.hook_rot_q(self.rotated(q, context.query_angles(self.cfg.rotary)))
            k = self.hook_rot_k(k)
        inputs = LatentInputs(query_input, q_latent, key_input)
        return self.output(self.attend(q, k, v, inputs, context, layer))

    @abstractmethod
    def attend(self, q: PerHead, k: Keys, v: Values, inputs: LatentInputs, context: Context, layer: int) -> Mixed:
        """The mixed values, for the queries, keys and values of the new tokens."""

    def rotated_keys(self, x: Float[Tensor, "batch pos *head d_model"], latent: Latent, context: Context) -> PerHead:
        """Keys after rotary, if there is one. Unless something listens, the shared features are rotated once for all heads."""
        if self.cfg.rotary is None:
            return self.hook_k(self.keys(x, latent))
        angles = context.key_angles(self.cfg.rotary)
        if is_listening(self.hook_k):
            return self.rotated(self.hook_k(self.keys(x, latent)), angles)
        return self.keys(x, latent, angles)

    def latent(self, x: Float[Tensor, "batch pos *head d_model"]) -> Latent:
        """The latent of keys and values."""
        down = F.linear(x, self.W_DKV.T, self.b_DKV)
        return times(normalised_latent(down, self.hook_kv_latent, self.kv_norm), self.cfg.kv_factor)

    def latent_unhooked(self, x: Float[Tensor, "batch pos *head d_model"]) -> Latent:
        """The latent of values whose input differs from that of keys; the sites are for the latent of keys."""
        return times(norm_unhooked(self.kv_norm, F.linear(x, self.W_DKV.T, self.b_DKV)), self.cfg.kv_factor)

    def q_latent(self, x: Float[Tensor, "batch pos *head d_model"]) -> Latent:
        """What the queries are projections of: their latent, or without one the input."""
        if self.cfg.d_q_latent is None:
            return x
        normed, raw = latents(F.linear(x, self.W_DQ.T, self.b_DQ), self.hook_q_latent, self.q_norm)
        return self.read_by_queries(times(normed, self.cfg.q_factor), raw)

    def read_by_queries(self, normed: Latent, raw: Latent) -> Latent:
        """The latent of queries, of its value after its norm and that before it."""
        return normed

    def queries(self, latent: Latent) -> PerHead:
        """Queries before rotary."""
        return project(latent, self.W_Q if self.cfg.d_q_latent is None else self.W_UQ, None)

    def keys(
        self, x: Float[Tensor, "batch pos *head d_model"], latent: Latent, angles: tuple[Tensor, Tensor] | None = None
    ) -> PerHead:
        """Keys before rotary; with angles, after it, where the shared features are rotated once for all heads."""
        nope, shared = project(latent, self.W_UK, None), F.linear(x, self.W_KR.T, self.b_KR)
        shared = normalised_latent(shared, self.hook_kr, self.kr_norm) if self.cfg.kr_norm else shared
        shared = shared[:, :, None] if x.ndim == 3 else shared
        if angles is not None and self.cfg.rotary is not None:
            shared = self.cfg.rotary.rotate(shared, angles)
        return torch.cat([nope, shared.expand(-1, -1, nope.shape[2], -1)], -1)

    def rotated(self, x: PerHead, angles: tuple[Tensor, Tensor]) -> PerHead:
        """The vectors with rotary applied to their last features."""
        assert self.cfg.rotary is not None, "there are angles"
        nope, rope = x[..., : self.cfg.d_nope], x[..., self.cfg.d_nope :]
        return torch.cat([nope, self.cfg.rotary.rotate(rope, angles)], -1)


class LatentAttention(AbstractLatentAttention):
    """Attention with keys `c W_UK` and values `c W_UV`, where the latent c is `norm(x W_DKV)`.

    Queries and keys have `d_nope` features without rotary and `rotary.dim` features with it; the rotary features of the key
    are `x W_KR`, shared by all heads. Without rotary `d_shared` is their number. Queries are `x W_Q`, or with `d_q_latent`
    `norm(x W_DQ) W_UQ`. `W_DKV`, `W_KR` and `W_DQ` are [d_model, d_latent], the others [head, ..., d_head]. `hook_q_latent`
    and `hook_kv_latent` are before the norms.
    """

    @dataclass(frozen=True)
    class Config(AbstractAttention.Config):
        """`down_bias` adds biases to the projections `W_DKV`, `W_KR` and `W_DQ`. The latents of queries and of keys and values
        are multiplied by `q_factor` and `kv_factor` after their norms. With `kr_norm` the shared features of the key, `hook_kr`,
        are normalised."""

        d_model: int
        n_heads: int
        d_nope: int
        d_value: int
        d_kv_latent: int
        rotary: Rotary | None
        d_q_latent: int | None = None
        scale: float | None = None  # of the scores; None: d_head ** -0.5
        latent_eps: float = 1e-6
        d_shared: int | None = None  # features of the key that all heads share; None: those with rotary
        q_factor: float = 1.0
        kv_factor: float = 1.0
        kr_norm: bool = False
        window: int | None = None  # how many positions back a query attends to, itself included
        down_bias: bool = False
        out_bias: bool = False
        causal: bool = True

        @property
        def d_head(self) -> int:  # type: ignore[override]
            return self.d_nope + self.n_shared

        @property
        def n_shared(self) -> int:
            """The number of features of the key that all heads share."""
            return self.d_shared or (0 if self.rotary is None else self.rotary.dim)

        def build(self) -> AbstractLatentAttention:
            return LatentAttention(self)

    def attend(self, q: PerHead, k: Keys, v: Values, inputs: LatentInputs, context: Context, layer: int) -> Mixed:
        """The mixed values, for the queries, keys and values of the new tokens."""
        k, v = context.update_kv(layer, k, v)
        return self.mix(q, k, v, context, layer, self.gate(inputs.query_input))


def times(latent: Latent, factor: float) -> Latent:
    """The latent, times a factor that is mostly 1."""
    return latent if factor == 1 else latent * factor


def normalised_latent(down: Latent, point: nn.Module, norm: nn.Module) -> Latent:
    """The norm of a latent, at its site. With one copy per head the sites have the mean, and edits apply to all copies."""
    return latents(down, point, norm)[0]


def latents(down: Latent, point: nn.Module, norm: nn.Module) -> tuple[Latent, Latent]:
    """The same, and the latent before the norm."""
    if down.ndim == 3:
        raw = point(down)
        return norm(raw), raw
    mean = down.mean(2)
    hooked = point(mean)
    raw = down + (hooked - mean)[:, :, None]
    norm_edit = norm(hooked) - norm_unhooked(norm, hooked)
    return norm_unhooked(norm, raw) + norm_edit[:, :, None], raw
