"""Multi-head and grouped-query attention (Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245).

`AbstractAttention` is common to all kinds of attention: it mixes values and writes into the stream. While nothing listens to the
scores or the pattern, it runs the fused kernel, else the same computation in steps (`steps.py`). Grouped heads are never copied.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.gpu_kernels import for_kernels
from hooked_lm.components.attention.parts import KEY as KEY
from hooked_lm.components.attention.parts import QUERY as QUERY
from hooked_lm.components.attention.parts import SCORES as SCORES
from hooked_lm.components.attention.position_bias import PositionBias, changes_scores
from hooked_lm.components.attention.projection import add_projections
from hooked_lm.components.attention.public_steps import PublicSteps
from hooked_lm.components.attention.steps import AttentionRows
from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.norms.norm import NormConfig, add_norm, norm_of
from hooked_lm.components.tl_call import attention_context
from hooked_lm.hooks import HookPoint, is_listening

SOFTMAX, METHOD = F.softmax, Tensor.softmax  # as PyTorch has them

Stream = Float[Tensor, "batch pos d_model"]
PerHead = Float[Tensor, "batch pos head d_head"]
Mixed = Float[Tensor, "batch pos head d_value"]
Keys = Float[Tensor, "batch key_pos kv_head d_head"]
Values = Float[Tensor, "batch key_pos kv_head d_value"]
KeyRows = Float[Tensor, "batch key_pos kv_head d_key"]  # keys, and what else of a token its scores depend on


class AbstractAttention(AttentionRows):
    """`z = softmax(q k^T * scale + bias + mask) v`, and `W_O` [head, d_value, d_model] back into the stream.

    Subclasses compute queries, keys and values, and call `mix` and `output`. With `sinks` each head has a learned score that
    takes part in the softmax without a value (Xiao et al. 2023, arXiv:2309.17453). A `z_norm` normalises the mixed values
    before `W_O`.
    """

    axes = {"W_Q": "head [d_model] d_head", "W_O": "[head d_head] d_model", "sinks": "head"}
    axes |= dict.fromkeys(("W_K", "W_V"), "kv_head [d_model] d_head")

    class Config(ABC):
        """What all kinds of attention have. A kind declares its mechanisms as fields; others have the values here."""

        d_model: int
        n_heads: int
        d_head: int  # the width of queries and keys
        scale: float | None  # of the scores; None: d_head ** -0.5
        rotary: Rotary | None
        n_key_value_heads: int | None = None
        out_bias: bool = False
        causal: bool = True
        window: int | None = None  # how many positions back a query attends to, itself included
        soft_cap: float | None = None
        sinks: bool = False
        position_bias: PositionBias | None = None
        qk_norm: NormConfig | None = None
        v_norm: NormConfig | None = None
        z_norm: NormConfig | None = None
        values_from_keys: bool = False
        clip: float | None = None

        @property
        def n_kv(self) -> int:
            """The number of key/value heads."""
            return self.n_key_value_heads or self.n_heads

        @abstractmethod
        def build(self) -> "AbstractAttention":
            """The attention of this config."""

    ungrouped = False  # whether each query head has a copy of its key/value head; only an `Attention` can be set so
    computes_kv = True  # whether it computes keys and values
    kv_source_layer: int | None = None  # otherwise the layer whose keys and values it uses
    key_value_parts: tuple[str, ...] = ("hook_k", "hook_v", "hook_rot_k", "k_norm", "v_norm", "W_K", "W_V")

    @property
    def n_kv(self) -> int:
        """The number of key/value heads at the hook points."""
        return self.cfg.n_heads if self.ungrouped else self.cfg.n_kv

    def mix(
        self, q: PerHead, k: Keys, v: Values, context: Context, layer: int = 0, gate: Tensor | None = None
    ) -> Float[Tensor, "batch pos head d_mixed"]:
        """The mixed values of each head, times their gate if there is one, at their site."""
        k, v, context = self.attended(q, k, v, context)
        z = context.attend_rows(layer, self.kernel(), q, k, v)
        return self.hook_z(z if gate is None else z * gate)

    def attended(self, q: PerHead, k: Keys, v: Values, context: Context) -> tuple[KeyRows, Values, Context]:
        """The keys and values that the queries of a run attend to, and the context of their scores."""
        return k, v, context

    def scored(self, q: PerHead, k: KeyRows, context: Context) -> tuple[PerHead, Keys, Context]:
        """What the scores of some rows of a run are computed from."""
        return q, k, context

    def kernel(self) -> Callable[[PerHead, Keys, Values, Context], Mixed]:
        """How values are mixed in this run: by the fused kernel, or in steps where something listens or the kernel cannot."""
        if not self.may_fuse(*self.more_sites()):
            return self.mix_in_steps
        is_plain = self.soft_cap is None and self.sinks is None
        return (
            self.mix_fused
            if is_plain and not is_listening(self.hook_attn_scores, self.hook_pattern)
            else self.mix_in_rows()
        )

    def more_sites(self) -> tuple[nn.Module, ...]:
        """The sites inside mixing, beside those of scores and pattern."""
        return ()

    def may_fuse(self, *inside: nn.Module) -> bool:
        """Whether a fused kernel may run: nothing listens inside it, and the softmax, which it does not call, is PyTorch's."""
        return self.settings.fused and not is_listening(*inside) and F.softmax is SOFTMAX and Tensor.softmax is METHOD

    def mix_fused(self, q: PerHead, k: KeyRows, v: Values, context: Context) -> Mixed:
        """The mixed values, by the fused kernel."""
        q, k, context = self.scored(q, k, context)
        is_biased = self.position_bias is not None and changes_scores(self.position_bias, context)
        mask = self.additive_mask(context, q.dtype) if is_biased else context.mask(self.causal, self.window)
        # one query attends to all keys; a branch, as n_pos is symbolic when compiled
        is_causal = False if context.n_pos == 1 else self.causal and mask is None
        return fused(q, k, v, mask, self.scale, is_causal)

    def additive_mask(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#batch #head query_pos key_pos"]:
        """The sum of the mask, minus infinity where a query may not attend to a key, and the bias of positions."""
        mask = self.mask_of_all(context.additive_mask(self.causal, self.window, dtype), context)
        return mask if self.position_bias is None else mask + self.position_bias.bias(context, dtype)

    def mask_of_all(self, mask: Tensor, context: Context) -> Float[Tensor, "#batch #head query_pos all_keys"]:
        """The mask of tokens, with that of keys that are no tokens."""
        return mask

    def output(self, z: Mixed) -> Stream:
        """The output of mixed values into the stream; head by head only if something listens."""
        if (out := self.fused_output(z)) is not None:
            return out
        z = norm_of(self, "z_norm")(z)
        if is_listening(self.hook_result) or (self.settings.attn_result and not self.settings.fused):
            result = self.hook_result(torch.einsum("bpnh,nhm->bpnm", z, self.W_O))
            return result.sum(2) if self.b_O is None else result.sum(2) + self.b_O
        return F.linear(z.flatten(2), self.W_O.flatten(0, 1).T, self.b_O)

    def fused_output(self, z: Mixed) -> Stream | None:
        """The same by a shorter way than `z_norm` and `W_O`; None without one, or if something listens on the way."""
        return None


class SelfAttention(AbstractAttention):
    """Attention whose queries, keys and values all come from the stream of its own layer."""

    def __call__(
        self,
        query_input: Tensor,
        key_input: Tensor | None = None,
        value_input: Tensor | None = None,
        context: object = None,
        layer: object = 0,
        *args: object,
        **kwargs: object,
    ) -> Stream:
        """Runs attention in a context; the arguments of the public interface are made into one (see `tl_call`)."""
        if args or kwargs or type(layer) is not int or not (context is None or isinstance(context, Context)):
            context, layer = attention_context(self, query_input, context, layer, *args, **kwargs), self.layer_id or 0
        return super().__call__(query_input, key_input, value_input, context, layer)

    def gate(self, query_input: Tensor) -> Tensor | None:
        """What the mixed values are multiplied by, in a `GatedAttention`."""
        return None


class ProjectedAttention(PublicSteps, SelfAttention):
    """Attention with the projections and norms of `Attention`; a kind writes its own forward pass with them."""

    clips_projections = True  # whether the `clip` of a config bounds the outputs of the projections
    q_norm: Any  # a norm, or None
    k_norm: Any

    def __init__(self, cfg: "Attention.Config") -> None:
        super().__init__()
        self.cfg = cfg
        add_projections(self, cfg, cfg.d_model, values=not cfg.values_from_keys)
        self.hook_q, self.hook_k = HookPoint(*QUERY), HookPoint(*KEY)
        add_norm(self, "v_norm", cfg.v_norm, KEY)
        self.hook_v = HookPoint(*KEY)
        in_order = (self._make_norms, self._make_rotary_points)
        for make in reversed(in_order) if cfg.rotary_first else in_order:
            make()
        self.make_mixing(cfg.d_head)

    @property
    def value_weights(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias of values."""
        return (self.W_K, self.b_K) if self.cfg.values_from_keys else (self.W_V, self.b_V)

    def _projected(self, x: Tensor, W: Tensor, b: Tensor | None) -> PerHead:
        projected, clip = project(x, W, b), self.cfg.clip if self.clips_projections else None
        return self.adapted(projected if clip is None else projected.clamp(-clip, clip), x, W)

    def adapted(self, projected: PerHead, x: Tensor, W: Tensor) -> PerHead:
        """The projection of x by W, with what an adapter adds to it."""
        return projected

    def _project_kv(self, x: Tensor, W: Tensor, b: Tensor | None) -> PerHead:
        """Keys or values; ungrouped, by a copy of the weight for each query head."""
        if self.n_kv != W.shape[0]:
            group = self.n_kv // W.shape[0]
            W, b = W.repeat_interleave(group, 0), None if b is None else b.repeat_interleave(group, 0)
        return self._projected(x, W, b)


class Attention(ProjectedAttention):
    """`z = softmax(q k^T * scale + mask) v`, and `W_O` back into the stream.

    `W_Q` is [head, d_model, d_head], `W_K` and `W_V` [kv_head, d_model, d_head], `W_O` [head, d_head, d_model]; a bias
    may be None. Each weight is one matrix in memory. With `ungrouped` set, keys and values are computed once for
    each query head.
    """

    @dataclass(frozen=True)
    class Config(AbstractAttention.Config):
        """`qk_norm` normalises queries and keys before rotary, or after it with `rotary_first`; `clip` bounds the outputs of the
        projections. With `values_from_keys` values have the weights of keys. `hook_v` is after `v_norm`. A layer with
        `is_kv_source` keeps its keys and values for `SharedKVAttention` in later layers."""

        d_model: int
        n_heads: int
        d_head: int
        n_key_value_heads: int | None = None
        scale: float | None = None  # of the scores; None: d_head ** -0.5
        qkv_bias: bool = False
        out_bias: bool = False
        rotary: Rotary | None = None
        qk_norm: NormConfig | None = None
        k_norm: NormConfig | None = None  # None: that of the queries
        rotary_first: bool = False
        v_norm: NormConfig | None = None
        values_from_keys: bool = False
        is_kv_source: bool = False
        z_norm: NormConfig | None = None
        clip: float | None = None
        window: int | None = None  # how many positions back a query attends to, itself included
        soft_cap: float | None = None
        sinks: bool = False
        position_bias: PositionBias | None = None
        causal: bool = True

        def build(self) -> ProjectedAttention:
            return Attention(self)

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_in"],
        key_input: Float[Tensor, "batch key_row *key_head d_in"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_value_in"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """The three inputs are the normalised stream, or one copy of it per (key/value) head; by default all are the first.

        `layer` is the index of this layer's entry in the context's key/value cache.
        """
        context = context or Context(query_input.shape[1], query_input.device)
        q = self.hook_q(self._projected(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(self._project_kv(query_input if key_input is None else key_input, self.W_K, self.b_K))
        values = self._project_kv(query_input if value_input is None else value_input, *self.value_weights)
        v = self.hook_v(norm_of(self, "v_norm")(values))
        if self.cfg.qk_norm is not None and not self.cfg.rotary_first:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.cfg.rotary is not None:
            q = self.hook_rot_q(self.cfg.rotary.rotate(q, context.query_angles(self.cfg.rotary)))
            k = self.hook_rot_k(self.cfg.rotary.rotate(k, context.key_angles(self.cfg.rotary)))
        if self.cfg.qk_norm is not None and self.cfg.rotary_first:
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = context.update_kv(layer, k, v)
        if self.cfg.is_kv_source:
            context.keep_kv(layer, k, v)
        return self.output(self.mix(q, k, v, context, layer, self.gate(query_input)))


def fused(q: PerHead, k: Keys, v: Values, mask: Tensor | None, scale: float, is_causal: bool = False) -> Mixed:
    """The mixed values of queries, by the fused kernel of their device."""
    d_value, missing = v.shape[-1], q.shape[-1] - v.shape[-1]
    if q.is_cuda:
        q, k, v = for_kernels(q, k, v, mask)
    elif missing > 0:  # padded: the fused CPU kernel needs values as wide as queries
        v = F.pad(v, (0, missing))
    gqa, q, k, v = k.shape[2] != q.shape[2], q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    return z.transpose(1, 2) if z.shape[-1] == d_value else z[..., :d_value].transpose(1, 2).contiguous()


def project(
    x: Float[Tensor, "batch pos *head d_model"],
    W: Float[Tensor, "head d_model d_head"],
    b: Float[Tensor, "head d_head"] | None,
) -> PerHead:
    """The queries, keys or values of a stream that all heads share, or of one copy per head."""
    if x.ndim == 4:
        projected = torch.einsum("bpnm,nmh->bpnh", x, W)
        return projected if b is None else projected + b
    bias = None if b is None else b.flatten()
    return F.linear(x, W.transpose(1, 2).flatten(0, 1), bias).unflatten(-1, (W.shape[0], W.shape[2]))
