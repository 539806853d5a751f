"""Attention in steps, with scores and pattern at their hook points: the same result as the fused kernel, up to rounding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import upcast

Scores = Float[Tensor, "batch head query_pos key_pos"]
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
