"""Attention in steps, with scores and pattern at their hook points: the same result as the fused kernel, up to rounding.

`AttentionRows` takes these steps for some rows: those that hooks need, or of a long text without a fused kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.parts import AttentionParts
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import upcast
from hooked_lm.hooks import HookPoint, is_listening
from hooked_lm.hooks.columns import row_blocks, showing, wanted_rows

Scores = Float[Tensor, "batch head query_pos key_pos"]
PerHead = Float[Tensor, "batch pos head d_head"]
Mixed = Float[Tensor, "batch pos head d_value"]
KeyRows = Float[Tensor, "batch key_pos kv_head d_key"]
Values = Float[Tensor, "batch key_pos kv_head d_value"]
UNHOOKED = (lambda scores: scores,) * 2  # in the place of sites


def mix_in_steps(
    attn: Any,
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_key"],
    v: Float[Tensor, "batch key_pos kv_head d_value"],
    context: Context,
    sites: Sequence[Callable[[Scores], Scores]] = (),
) -> Float[Tensor, "batch pos head d_value"]:
    """The mixed values of each head, with scores and pattern at their sites, or passed to other functions."""
    q, k, context = attn.scored(q, k, context)
    mask = attn.additive_mask(context, q.dtype)
    given = attn.scale, attn.soft_cap, attn.sinks
    return mix_masked(q, k, v, mask, *given, *(sites or attn.sites_of_scores))


def mix_masked(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch key_pos kv_head d_head"],
    v: Float[Tensor, "batch key_pos kv_head d_value"],
    mask: Float[Tensor, "#batch #head #query_pos key_pos"],
    scale: float,
    soft_cap: float | None,
    sinks: Float[Tensor, " head"] | None,
    at_scores: Callable[[Scores], Scores],
    at_pattern: Callable[[Scores], Scores],
) -> Float[Tensor, "batch pos head d_value"]:
    """The same with this mask, and with functions of scores and pattern. The query heads of a group are rows of one product."""
    batch, n_pos, n_heads, d_head = q.shape
    n_key, n_kv = k.shape[1:3]
    grouped = (batch * n_kv, n_heads // n_kv * n_pos)
    scores_shape = (batch, n_heads, n_pos, n_key)

    queries = q.transpose(1, 2).reshape(*grouped, d_head)
    keys = k.permute(0, 2, 3, 1).flatten(0, 1)
    if soft_cap is None:
        rows = _rows(mask, batch, n_pos, n_heads, n_kv)
        scores = torch.baddbmm(rows, queries, keys, alpha=scale).view(scores_shape)
    else:
        scores = (torch.bmm(queries, keys) * (scale / soft_cap)).view(scores_shape)
        scores = soft_cap * scores.tanh() + mask

    pattern = at_pattern(softmax(at_scores(scores), sinks).to(v.dtype))
    z = torch.bmm(pattern.reshape(*grouped, n_key), v.transpose(1, 2).flatten(0, 1))
    return z.view(batch, n_heads, n_pos, -1).transpose(1, 2)


def softmax(scores: Scores, sinks: Float[Tensor, " head"] | None) -> Scores:
    """The pattern, in at least fp32. With sinks its rows sum to less than one: the rest goes to the sink of the head."""
    if sinks is None:
        return F.softmax(upcast(scores), -1)
    of_sinks = upcast(sinks)[:, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
    return F.softmax(torch.cat([upcast(scores), of_sinks], -1), -1)[..., :-1]


def _rows(
    mask: Float[Tensor, "#batch #head #query_pos key_pos"], batch: int, n_pos: int, n_heads: int, n_kv: int
) -> Tensor:
    """The mask of the grouped product: [rows, key_pos] if all prompts and heads share it, else one for each product."""
    if mask.shape[:2] == (1, 1):
        return mask[0].expand(n_heads // n_kv, n_pos, -1).reshape(-1, mask.shape[-1])
    return mask.expand(batch, n_heads, n_pos, -1).reshape(batch * n_kv, -1, mask.shape[-1])


def products(q: Float[Tensor, "batch pos head d_head"], k: Float[Tensor, "batch key_pos kv_head d_head"]) -> Scores:
    """The products of queries and keys, whose heads may be grouped."""
    return torch.einsum("bqngh,bknh->bngqk", q.unflatten(2, (k.shape[2], -1)), k).flatten(1, 2)


def mixed(
    pattern: Scores, v: Float[Tensor, "batch key_pos kv_head d_value"]
) -> Float[Tensor, "batch query_pos head d_value"]:
    """The values, mixed by a pattern."""
    grouped = pattern.unflatten(1, (v.shape[2], -1))
    return torch.einsum("bngqk,bknh->bqngh", grouped, v).flatten(2, 3)


class AttentionRows(AttentionParts):
    """How values are mixed where attention is not, or not only, the fused kernel of all rows."""

    mix_in_steps: Callable[..., Mixed] = mix_in_steps
    mixes_rows_alone = True  # whether `mix_in_steps` can be given some queries
    mix_fused: Any

    def mix_in_rows(self) -> Callable[..., Mixed]:
        """How values are mixed if something listens to scores or pattern, or the fused kernel cannot mix them."""
        if not is_listening(*self.sites_of_scores):
            return self.mix_unhooked
        return self.mix_rows_in_steps if self.may_mix_rows else self.mix_in_steps

    @property
    def mix_unhooked(self) -> Callable[..., Mixed]:
        """How values are mixed without sites: by the fused kernel, if there is one for their scores."""
        if self.soft_cap is None and self.sinks is None:
            return self.mix_fused
        return self.mix_in_blocks if self.may_mix_rows else self.mix_in_steps

    @property
    def may_mix_rows(self) -> bool:
        """Whether some queries may be mixed by themselves: hooks at a bias of positions have to see that of all."""
        bias = self.position_bias
        return self.mixes_rows_alone and not (isinstance(bias, RelativeBias) and is_listening(bias.hook_bias))

    @property
    def sites_of_scores(self) -> tuple[nn.Module, nn.Module]:
        """The sites of scores and pattern."""
        return self.hook_attn_scores, self.hook_pattern

    def mix_rows_in_steps(self, q: PerHead, k: KeyRows, v: Values, context: Context) -> Mixed:
        """The mixed values; only the rows of scores and pattern that hooks read or change are computed.

        Values that no hook changes are those of a run without hooks, bit for bit.
        """
        n, points = q.shape[1], [point for point in self.sites_of_scores if isinstance(point, HookPoint)]
        blocks = wanted_rows(self.sites_of_scores, (q.shape[0], q.shape[2], n, k.shape[1]))
        if blocks is None:
            return self.mix_in_steps(q, k, v, context)
        z = self.mix_unhooked(q, k, v, context)
        for block in blocks:
            rows, sites = torch.tensor(block, device=q.device), [showing(point, block, n) for point in points]
            own = self.mix_in_steps(q[:, rows], k, v, context.of_queries(rows), sites)
            z = z.index_copy(1, rows, own) if any(point.is_edited for point in points) else z
        return z

    def mix_in_blocks(self, q: PerHead, k: KeyRows, v: Values, context: Context) -> Mixed:
        """The mixed values in steps, without sites; of long texts some rows at a time."""
        blocks = row_blocks(q.shape[1], q.shape[0] * q.shape[2] * k.shape[1])
        if len(blocks) == 1:
            return self.mix_in_steps(q, k, v, context, UNHOOKED)
        columns, z = torch.arange(q.shape[1], device=q.device), v.new_empty(*q.shape[:3], v.shape[-1])
        for rows in blocks:
            z[:, rows] = self.mix_in_steps(q[:, rows], k, v, context.of_queries(columns[rows]), UNHOOKED)
        return z
