"""Attention whose heads are split over ranks."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooked_lm.components.activations import XIELU
from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.attention.multihead import Attention, Keys, Mixed, PerHead, Stream, Values
from hooked_lm.components.attention.position_bias import PositionBias
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.axes import places_of
from hooked_lm.components.context import Context
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of
from hooked_lm.hooks import HookPoint, is_listening
from hooked_lm.parallel.guard import SplitModule, computing, split_class
from hooked_lm.parallel.norms import split_norm
from hooked_lm.parallel.points import replace_points, replicated_point, split_point
from hooked_lm.parallel.ranks import Ranks

HEADS, KV_HEADS = places_of(GatedAttention, "head"), places_of(GatedAttention, "kv_head")  # weights -> axis
KV_PARTS = ("hook_k", "hook_v", "hook_rot_k", "k_norm", "v_norm")
NORMS = ("q_norm", "k_norm", "v_norm", "z_norm")
HEAD_AXIS = 2  # of queries, keys, values and inputs per head


class SplitAttention(SplitModule, Attention):
    """Each rank has some of the query heads with their key/value heads.

    If there are fewer key/value heads than ranks, or their number is no multiple of it, keys and values are replicated, and
    each rank takes those of its query heads.
    """

    guarded = (*HEADS, *KV_HEADS)
    splits_kv: bool

    def forward(
        self,
        query_input: Tensor,
        key_input: Tensor | None = None,
        value_input: Tensor | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """As `Attention.forward`, with replicated inputs and output."""
        queries = self._own(query_input)
        keys, values = queries if self.splits_kv else query_input, queries if self.splits_kv else query_input
        if key_input is not None and key_input is not query_input:
            keys = self._own(key_input) if self.splits_kv else key_input
        if value_input is not None and value_input is not query_input:
            values = keys if value_input is key_input else self._own(value_input) if self.splits_kv else value_input
        with computing():
            return super().forward(queries, keys, values, context, layer)

    def n_full_at(self, name: str) -> int | None:
        """The number of heads of a full value at `hook_z`, where the engine lets cells enter."""
        return self.cfg.n_heads if name == "hook_z" and self.ranks.size > 1 else None

    def _own(self, x: Tensor) -> Tensor:
        """The input of this rank's heads: the stream, or their copies of it."""
        return self.ranks.enter(x) if x.ndim == 3 else self.ranks.own_part(x, HEAD_AXIS)

    def _project_kv(self, x: Tensor, W: Tensor, b: Tensor | None) -> PerHead:
        if (group := self.n_kv // self.cfg.n_kv) > 1:  # ungrouped
            W, b = W.repeat_interleave(group, 0), None if b is None else b.repeat_interleave(group, 0)
        return self._projected(x, W, b)

    def mix(
        self, q: PerHead, k: Keys, v: Values, context: Context, layer: int = 0, gate: Tensor | None = None
    ) -> Mixed:
        """The mixed values of this rank's heads."""
        if not self.splits_kv:
            k, v = self._kv_of_own_heads(k), self._kv_of_own_heads(v)
        return super().mix(q, k, v, context, layer, gate)

    def _kv_of_own_heads(self, x: Keys) -> Keys:
        """The keys or values that this rank's query heads use; one per query head where groups are uneven."""
        part, group = self.ranks.slice_of(self.cfg.n_heads), self.cfg.n_heads // x.shape[HEAD_AXIS]
        heads = [head // group for head in range(part.start, part.stop)]
        runs = [len(list(run)) for _, run in groupby(heads)]
        if len(set(runs)) == 1:
            heads = sorted(set(heads))
        return self.ranks.enter(x).index_select(HEAD_AXIS, torch.tensor(heads, device=x.device))

    def additive_mask(self, context: Context, dtype: torch.dtype) -> Tensor:
        """The mask and the bias of positions, for this rank's heads."""
        mask = context.additive_mask(self.causal, self.window, dtype)
        if self.position_bias is None:
            return mask
        bias = self.position_bias.bias(context, dtype)
        return mask + (bias if bias.shape[1] == 1 else self.ranks.own_part(bias, 1))

    def output(self, z: Mixed) -> Stream:
        """The output of all ranks' heads into the stream."""
        with computing():
            z = norm_of(self, "z_norm")(z)
            if is_listening(self.hook_result) or (self.settings.attn_result and not self.settings.fused):
                out = self.hook_result(torch.einsum("bpnh,nhm->bpnm", z, self.W_O)).sum(2)
            else:
                out = F.linear(z.flatten(2), self.W_O.flatten(0, 1).T)
        out = self.ranks.add_up(out)
        return out if self.b_O is None else out + self.b_O


class SplitGatedAttention(SplitAttention, GatedAttention):
    """Attention with a gate, split by heads."""


CLASSES: dict[type[nn.Module], type[SplitAttention]] = {
    Attention: SplitAttention,
    GatedAttention: SplitGatedAttention,
}


def obstacles(attn: Attention, ranks: Ranks) -> Iterator[str]:
    """Why this attention cannot be split."""
    if attn.cfg.n_heads % ranks.size:
        yield f"{attn.cfg.n_heads} heads are no multiple of {ranks.size}"
    for name, _ in attn.named_parameters(recurse=False):
        if name not in (*HEADS, *KV_HEADS, "b_O"):
            yield f"its parameter {name} is unknown"
    for name, part in attn.named_children():
        is_norm = name in NORMS and type(part) in (RMSNorm, LayerNorm)
        is_whole = isinstance(part, HookPoint | RelativeBias | XIELU | nn.Identity)
        if not is_norm and (name in NORMS or not is_whole):
            yield f"{name}, {type(part).__name__}, is unknown"
    if not isinstance(attn.position_bias, PositionBias | RelativeBias | None):
        yield f"its position bias {type(attn.position_bias).__name__} is unknown"
    if attn.cfg.is_kv_source:
        yield "later layers use its keys and values"


def split_attention(module: nn.Module, ranks: Ranks) -> SplitAttention:
    """The attention for this one, split by heads."""
    attn = split_class(module, CLASSES[type(module)], ranks)
    attn.splits_kv = attn.cfg.n_kv % ranks.size == 0
    for name, axis in (HEADS | KV_HEADS if attn.splits_kv else HEADS).items():
        if attn._parameters.get(name) is not None:
            attn.take_part(name, axis)
    for name, part in list(attn.named_children()):
        is_replicated = isinstance(part, RelativeBias) or (name in KV_PARTS and not attn.splits_kv)
        new = replicated_point if is_replicated else partial(split_point, ranks=ranks, n_full=attn.n_full_at(name))
        if isinstance(part, HookPoint):
            setattr(attn, name, new(part))
            continue
        replace_points(part, new)
        if isinstance(part, RMSNorm | LayerNorm) and not is_replicated:
            _split_norm(attn, name, part)
        elif not is_replicated:
            for weight, _ in part.named_parameters():  # of the activation function of a gate
                attn.sum_gradient(f"{name}.{weight}")
    return attn


def _split_norm(attn: SplitAttention, name: str, norm: RMSNorm | LayerNorm) -> None:
    """Splits the weights of a norm that has its own for each head; otherwise sums their gradients."""
    per_head = norm.cfg.n_heads is not None
    for weight, _ in norm.named_parameters():
        attn.take_part(f"{name}.{weight}", 0) if per_head else attn.sum_gradient(f"{name}.{weight}")
    if per_head:
        setattr(attn, name, split_norm(norm, attn.ranks))
