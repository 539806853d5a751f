"""Attention with a mask that depends on the values (Shi et al. 2025, arXiv:2508.02124), as in Doge."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import Attention, KeyRows, Keys, PerHead, Values
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import upcast
from hooked_lm.hooks import HookPoint

Bias = Float[Tensor, "batch key_pos kv_head"]


class ValueMaskedAttention(Attention):
    """Attention with `scores = q k^T * scale + bias`, where a key has the bias `exp(A * softplus(v W_dt + b_dt))`.

    v are the values of all key/value heads at the key; the heads of a group share a bias. Of more than `keep` keys, a query
    attends to the `keep` with the largest bias among those that it may see, of equal ones to the last. `W_dt` is
    [kv_head, d_head, kv_head], of values and of biases; `A` and `b_dt` are [kv_head].

    `hook_key_bias` is the bias of every key, past ones too. Sweeps run its edits as whole forward passes.
    """

    mixes_linearly = False
    axes = {"W_dt": "[kv_head d_head] kv_head; it is multiplied in fp32"}

    @dataclass(frozen=True)
    class Config(Attention.Config):
        keep: int = 2048

        def build(self) -> "ValueMaskedAttention":
            return ValueMaskedAttention(self)

    cfg: Config

    def make_parts(self, d_value: int) -> None:
        cfg = self.cfg
        self.W_dt = nn.Parameter(torch.empty(cfg.n_kv, d_value, cfg.n_kv))
        self.b_dt = nn.Parameter(torch.zeros(cfg.n_kv)) if cfg.qkv_bias else None
        self.A = nn.Parameter(torch.zeros(cfg.n_kv))
        self.hook_key_bias = HookPoint("batch", "key_pos", "kv_head")

    def key_bias(self, v: Values) -> Bias:
        """The bias of each key, from its values, in at least fp32. Of copies of values for query heads the mean is read."""
        v = upcast(v).unflatten(2, (self.cfg.n_kv, -1)).mean(3)
        dt = torch.einsum("bknh,nho->bko", v, upcast(self.W_dt))
        return (upcast(self.A) * F.softplus(dt if self.b_dt is None else dt + upcast(self.b_dt))).exp()

    def attended(self, q: PerHead, k: Keys, v: Values, context: Context) -> tuple[KeyRows, Values, Context]:
        """The keys with their biases, and the values."""
        bias = self.hook_key_bias(self.key_bias(v).to(k.dtype))
        bias = bias.repeat_interleave(k.shape[2] // self.cfg.n_kv, 2)
        return torch.cat([k, bias[..., None]], -1), v, context  # one more feature of each key

    def scored(self, q: PerHead, k: KeyRows, context: Context) -> tuple[PerHead, Keys, Context]:
        """What the scores are computed from; the biases are in the mask of the context."""
        return q, k[..., :-1], self.masked(k, q, context)

    def masked(self, k: KeyRows, q: PerHead, context: Context) -> Context:
        """The context whose mask has the biases of these keys, and minus infinity where a key is not chosen."""
        bias = k[..., -1].transpose(1, 2)[:, :, None]
        if k.shape[1] > self.cfg.keep:
            seen = context.additive_mask(self.causal, self.window, q.dtype).isfinite()
            bias = bias.masked_fill(~chosen(seen, bias, self.cfg.keep), float("-inf"))
        return context.adding(bias.repeat_interleave(q.shape[2] // k.shape[2], 1))


def chosen(
    seen: Bool[Tensor, "#batch #head query_pos key_pos"], bias: Float[Tensor, "batch kv_head 1 key_pos"], keep: int
) -> Bool[Tensor, "batch kv_head query_pos key_pos"]:
    """Of the keys that each query may see the first `keep` in the order of their biases, which all queries share.

    Repeated tokens have equal biases in the first layer, up to rounding: the last is the first.
    """
    order = seen.shape[-1] - 1 - bias.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    order = order.expand(-1, -1, seen.shape[-2], -1)
    in_order = seen.expand_as(order).gather(-1, order)
    return torch.zeros_like(in_order).scatter(-1, order, in_order & (in_order.cumsum(-1) <= keep))
