"""A learned bias on the scores for each distance between query and key (Raffel et al. 2019, arXiv:1910.10683)."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.stack_context import StackContext
from hooked_lm.hooks import HookPoint, is_listening

Bias = Float[Tensor, "#batch head query_pos key_pos"]


class RelativeBias(nn.Module):
    """`W_rel[bucket of (key - query)]` for each head; `W_rel` is [bucket, head].

    Short distances have one bucket each; longer ones share buckets that widen geometrically up to `max_distance`, where the
    last begins. If `bidirectional`, half of the buckets are for keys after the query; otherwise such keys have the bucket
    of distance 0. `hook_bias` is the bias of every layer that shares it.
    """

    axes = {"W_rel": "[bucket] head; its rows are looked up"}

    @dataclass(frozen=True)
    class Config:
        n_heads: int
        n_buckets: int = 32
        max_distance: int = 128
        bidirectional: bool = True

        def of(self, distance: Int[Tensor, "*batch query_pos key_pos"]) -> Int[Tensor, "*batch query_pos key_pos"]:
            """The bucket of each distance from query to key, negative for keys before the query."""
            if self.bidirectional:
                n_buckets = self.n_buckets // 2
                first, far = (distance > 0).long() * n_buckets, distance.abs()
            else:
                n_buckets, first, far = self.n_buckets, torch.zeros_like(distance), (-distance).clamp(min=0)
            n_exact = n_buckets // 2
            growth = torch.log(far.clamp(min=1).float() / n_exact) / math.log(self.max_distance / n_exact)
            shared = (n_exact + (growth * (n_buckets - n_exact)).long()).clamp(max=n_buckets - 1)
            return first + torch.where(far < n_exact, far, shared)

        def build(self) -> "RelativeBias":
            return RelativeBias(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_rel = nn.Parameter(torch.empty(cfg.n_buckets, cfg.n_heads))
        self.hook_bias = HookPoint("batch", "head", "query_pos", "key_pos")

    def bias(self, context: Context, dtype: torch.dtype) -> Bias:
        """The bias of the scores."""
        distance = context.once("distance", lambda: _distance(context))
        buckets = context.once(self.cfg, lambda: self.buckets(distance))
        bias = rearrange(F.embedding(buckets, self.W_rel), "query_pos key_pos head -> 1 head query_pos key_pos")
        if is_listening(self.hook_bias):
            assert isinstance(context, StackContext), "hook_bias needs the context of a stack, which has the batch size"
            bias = self.hook_bias(bias.expand(context.batch, -1, -1, -1).contiguous())
        return self.of_all_keys(bias.to(dtype), context)

    def of_all_keys(self, bias: Bias, context: Context) -> Float[Tensor, "#batch head query_pos all_keys"]:
        """The bias of tokens, with that of keys that are no tokens."""
        return bias

    @property
    def weight(self) -> Float[Tensor, "bucket head"]:
        """`W_rel`, by its name in other libraries."""
        return self.W_rel

    def between(self, n_query: int, n_key: int) -> Float[Tensor, "1 head query_pos key_pos"]:
        """The bias for queries and keys that are counted from the same position."""
        query, key = (torch.arange(n, device=self.W_rel.device) for n in (n_query, n_key))
        return rearrange(
            self.W_rel[self.buckets(key - query[:, None])], "query_pos key_pos head -> 1 head query_pos key_pos"
        )

    def buckets(self, distance: Int[Tensor, "*batch query_pos key_pos"]) -> Int[Tensor, "*batch query_pos key_pos"]:
        """The row of `W_rel` for each distance from query to key, negative for keys before the query."""
        return self.cfg.of(distance)


def _distance(context: Context) -> Int[Tensor, "query_pos key_pos"]:
    key = torch.arange(context.n_key, device=context.device)
    return key - context.queries[:, None]
