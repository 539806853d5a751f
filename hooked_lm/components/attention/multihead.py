"""Multi-head and grouped-query attention (Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023,
arXiv:2305.13245): how queries, keys and values come from the stream. `attend` has what follows."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.attend import KEY, QUERY, Attend, PerHead, Stream, project, projection
from hooked_lm.components.attention.position_bias import PositionBias
from hooked_lm.components.context import Context
from hooked_lm.components.norm import NormConfig, add_norm, build_norm, norm_of
from hooked_lm.components.public_call import public_attention
from hooked_lm.components.rotary import Rotary
from hooked_lm.hooks import HookPoint


class Attention(Attend):
    """`z = softmax(q k^T * scale + mask) v`, and `W_O` back into the stream.

    `W_Q` is [head, d_model, d_head], `W_K` and `W_V` [kv_head, d_model, d_head], `W_O` [head, d_head, d_model]; a bias
    may be None. The strides of the weights are those of one matrix product. With `ungrouped` set, keys and values are
    made, shown and edited once for each query head.
    """

    @dataclass(frozen=True)
    class Config:
        """`qk_norm` normalises queries and keys before rotary, or after it with `rotary_first`; `clip` bounds what the
        projections give. Values may be normalised too, and with `values_from_keys` be made by the weights of keys; what
        passes `hook_v` is what is mixed. A layer that `lends` leaves its keys and values for later ones."""

        d_model: int
        n_heads: int
        d_head: int
        n_key_value_heads: int | None = None
        scale: float | None = None  # of the scores; None: d_head ** -0.5
        qkv_bias: bool = False
        out_bias: bool = False
        rotary: Rotary | None = None
        qk_norm: NormConfig | None = None
        k_norm: NormConfig | None = None  # where it is not that of the queries
        rotary_first: bool = False
        v_norm: NormConfig | None = None
        values_from_keys: bool = False
        lends: bool = False
        z_norm: NormConfig | None = None
        clip: float | None = None
        window: int | None = None  # how many positions back a query sees, itself included
        soft_cap: float | None = None
        sinks: bool = False
        position_bias: PositionBias | None = None
        causal: bool = True

        @property
        def n_kv(self) -> int:
            return self.n_key_value_heads or self.n_heads

        def build(self) -> "Attention":
            return Attention(self)

    q_norm: Any  # a norm, or None
    k_norm: Any

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        if cfg.n_heads % cfg.n_kv:
            raise ValueError(f"{cfg.n_heads} heads cannot share {cfg.n_kv} key/value heads evenly")
        self.cfg = cfg
        self.ungrouped = False
        self.W_Q = projection(cfg.n_heads, cfg.d_model, cfg.d_head)
        self.W_K = projection(cfg.n_kv, cfg.d_model, cfg.d_head)
        if not cfg.values_from_keys:
            self.W_V = projection(cfg.n_kv, cfg.d_model, cfg.d_head)
        self.b_Q = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)) if cfg.qkv_bias else None
        self.b_K = nn.Parameter(torch.zeros(cfg.n_kv, cfg.d_head)) if cfg.qkv_bias else None
        if not cfg.values_from_keys:
            self.b_V = nn.Parameter(torch.zeros(cfg.n_kv, cfg.d_head)) if cfg.qkv_bias else None

        self.hook_q, self.hook_k = HookPoint(*QUERY), HookPoint(*KEY)
        add_norm(self, "v_norm", cfg.v_norm, KEY)
        self.hook_v = HookPoint(*KEY)
        in_order = (self._make_norms, self._make_rotary_points)
        for make in reversed(in_order) if cfg.rotary_first else in_order:
            make()
        self.make_mixing(
            cfg.n_heads,
            cfg.d_head,
            cfg.d_model,
            scale=cfg.d_head**-0.5 if cfg.scale is None else cfg.scale,
            out_bias=cfg.out_bias,
            causal=cfg.causal,
            window=cfg.window,
            soft_cap=cfg.soft_cap,
            sinks=cfg.sinks,
            position_bias=cfg.position_bias,
            z_norm=cfg.z_norm,
        )

    def _make_norms(self) -> None:
        if self.cfg.qk_norm is not None:
            self.q_norm = build_norm(self.cfg.qk_norm, QUERY)
            self.k_norm = build_norm(self.cfg.k_norm or self.cfg.qk_norm, KEY)
        else:  # the public interface says so by None
            self.q_norm = self.k_norm = None

    def _make_rotary_points(self) -> None:
        if self.cfg.rotary is not None:
            self.hook_rot_q, self.hook_rot_k = HookPoint(*QUERY), HookPoint(*KEY)

    @public_attention
    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch key_row *key_head d_model"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_model"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """The three inputs are the normalised stream, or one copy of it per (key/value) head; by default all the same.

        `layer` says which entry of the context's key/value cache is this layer's.
        """
        context = context or Context(query_input.shape[1], query_input.device)
        q = self.hook_q(self._projected(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(self._project_kv(query_input if key_input is None else key_input, self.W_K, self.b_K))
        made = self._project_kv(query_input if value_input is None else value_input, *self.value_weights)
        v = self.hook_v(norm_of(self, "v_norm")(made))
        if self.cfg.qk_norm is not None and not self.cfg.rotary_first:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.cfg.rotary is not None:
            q = self.hook_rot_q(self.cfg.rotary.rotate(q, context.query_angles(self.cfg.rotary)))
            k = self.hook_rot_k(self.cfg.rotary.rotate(k, context.key_angles(self.cfg.rotary)))
        if self.cfg.qk_norm is not None and self.cfg.rotary_first:
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = context.update_kv(layer, k, v)
        if self.cfg.lends:
            context.keep_kv(layer, k, v)
        return self.output(self.mix(q, k, v, context, layer))

    @property
    def n_kv(self) -> int:
        """How many key/value heads there are at the hook points."""
        return self.cfg.n_heads if self.ungrouped else self.cfg.n_kv

    @property
    def value_weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias that make values."""
        return (self.W_K, self.b_K) if self.cfg.values_from_keys else (self.W_V, self.b_V)

    def _projected(self, x: Tensor, W: Tensor, b: Tensor | None) -> PerHead:
        projected = project(x, W, b)
        return projected if self.cfg.clip is None else projected.clamp(-self.cfg.clip, self.cfg.clip)

    def _project_kv(self, x: Tensor, W: Tensor, b: Tensor | None) -> PerHead:
        """Keys or values; ungrouped, by a copy of the weight for each query head."""
        if self.n_kv != W.shape[0]:
            group = self.n_kv // W.shape[0]
            W, b = W.repeat_interleave(group, 0), None if b is None else b.repeat_interleave(group, 0)
        return self._projected(x, W, b)

    @property
    def is_linear_in_values(self) -> bool:
        """Whether what all values share arrives in the output as it is, through `W_O`."""
        cfg = self.cfg
        normed = cfg.v_norm is not None or cfg.z_norm is not None
        return not normed and not cfg.values_from_keys and cfg.clip is None and self.sinks is None
