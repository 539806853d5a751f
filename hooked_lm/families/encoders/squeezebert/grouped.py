"""Attention whose projections are grouped linear maps (SqueezeBERT, Iandola et al. 2020, arXiv:2006.11316)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import KEY, QUERY, Mixed, PerHead, SelfAttention, Stream, project
from hooked_lm.components.context import Context
from hooked_lm.components.grouped import block_diagonal, grouped_linear, groups_of
from hooked_lm.hooks import HookPoint, is_listening

Projection = Float[Tensor, "head d_model d_head"]


class GroupedAttention(SelfAttention):
    """Attention with grouped maps: `W_Q_groups`, `W_K_groups`, `W_V_groups` and `W_O_groups` are [group, d_in / groups, d_out /
    groups], where the inputs of `W_O_groups` and the outputs of the others are the features of all heads.

    `W_Q`, `W_K`, `W_V` and `W_O` are the whole matrices, in the shapes of `Attention`: a head reads and writes a part of the
    stream, and they are zero elsewhere. They are computed at each access and cannot be changed in place.
    """

    axes = dict.fromkeys(
        ("W_Q_groups", "W_K_groups", "W_V_groups", "W_O_groups"), "group [d_in] d_out; it is block-diagonal"
    )

    @dataclass(frozen=True)
    class Config(SelfAttention.Config):
        d_model: int
        n_heads: int
        d_head: int
        n_groups_q: int = 1
        n_groups_k: int = 1
        n_groups_v: int = 1
        n_groups_out: int = 1
        scale: float | None = None
        causal: bool = False
        out_bias, rotary = True, None

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            groups = (self.n_groups_q, self.n_groups_k, self.n_groups_v, self.n_groups_out)
            return sum(self.d_model * self.n_heads * self.d_head // n for n in groups)

        def build(self) -> "GroupedAttention":
            return GroupedAttention(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        d_heads = cfg.n_heads * cfg.d_head
        for name, n_groups in {"Q": cfg.n_groups_q, "K": cfg.n_groups_k, "V": cfg.n_groups_v}.items():
            self.register_parameter(f"W_{name}_groups", groups_of(n_groups, cfg.d_model, d_heads))
            self.register_parameter(f"b_{name}", nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)))
        self.hook_q, self.hook_k, self.hook_v = HookPoint(*QUERY), HookPoint(*KEY), HookPoint(*KEY)
        self.make_mixing(cfg.d_head)
        del self._parameters["W_O"]
        self.W_O_groups = groups_of(cfg.n_groups_out, d_heads, cfg.d_model)

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch pos *key_head d_model"] | None = None,
        value_input: Float[Tensor, "batch pos *value_head d_model"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """Each input is the stream, or one copy of it per head; by default all are the first."""
        context = context or Context(query_input.shape[1], query_input.device)
        q = self.hook_q(self.projected("Q", query_input))
        k = self.hook_k(self.projected("K", query_input if key_input is None else key_input))
        v = self.hook_v(self.projected("V", query_input if value_input is None else value_input))
        return self.output(self.mix(q, k, v, context, layer))

    def projected(self, name: str, x: Float[Tensor, "batch pos *head d_model"]) -> PerHead:
        """The queries (Q), keys (K) or values (V)."""
        bias = getattr(self, f"b_{name}")
        if x.ndim == 4:
            return project(x, getattr(self, f"W_{name}"), bias)
        return grouped_linear(x, getattr(self, f"W_{name}_groups"), bias.flatten()).unflatten(-1, bias.shape)

    def fused_output(self, z: Mixed) -> Stream | None:
        """The output by grouped maps, unless something listens to that of heads."""
        if is_listening(self.hook_result) or not self.settings.fused:
            return None
        return grouped_linear(z.flatten(2), self.W_O_groups, self.b_O)

    def _whole(self, name: str) -> Projection:
        whole = block_diagonal(getattr(self, f"W_{name}_groups"))
        return whole.unflatten(1, (self.cfg.n_heads, self.cfg.d_head)).transpose(0, 1)

    @property
    def W_Q(self) -> Projection:  # type: ignore[override]
        """The whole query weight."""
        return self._whole("Q")

    @property
    def W_K(self) -> Projection:  # type: ignore[override]
        """The whole key weight."""
        return self._whole("K")

    @property
    def W_V(self) -> Projection:  # type: ignore[override]
        """The whole value weight."""
        return self._whole("V")

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:  # type: ignore[override]
        """The whole output weight."""
        return block_diagonal(self.W_O_groups).unflatten(0, (self.cfg.n_heads, self.cfg.d_head))
