"""Attention and blocks called by themselves, with the arguments of the public interface instead of a `Context`."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.kv_cache import KeyValueCache, KeyValueCacheEntry
from hooked_lm.components.stack_context import StackContext

Scores = Float[Tensor, "#batch #head #query_pos #key_pos"]


class _OneEntry(KeyValueCache):
    """A cache of one layer, whichever asks."""

    def __init__(self, entry: KeyValueCacheEntry) -> None:
        super().__init__(0)
        self.entries = [entry]

    def __getitem__(self, layer: int) -> KeyValueCacheEntry:
        return super().__getitem__(0)


class CallContext(StackContext):
    """The context of one call: masks as a model makes them, and what is `added` to the scores besides."""

    def __init__(
        self,
        x: Float[Tensor, "batch pos *head d_model"],
        past_kv_cache_entry: KeyValueCacheEntry | None = None,
        attention_mask: Tensor | None = None,
        additive_attention_mask: Scores | None = None,
        position_bias: Scores | None = None,
    ) -> None:
        cache = None if past_kv_cache_entry is None else _OneEntry(past_kv_cache_entry)
        real = None if attention_mask is None else attention_mask.to(x.device).bool()
        super().__init__(x.shape[0], x.shape[1], x.device, real, cache)
        if real is not None and real.shape[1] != self.n_key:
            raise ValueError(
                f"attention_mask is of {real.shape[1]} positions, past ones included; there are {self.n_key}"
            )
        self.added, self.score_bias = additive_attention_mask, position_bias

    def mask(self, causal: bool, window: int | None) -> Tensor | None:
        """Which keys a query may see, as numbers to add if there are such."""
        return (
            super().mask(causal, window) if self.added is None else self.additive_mask(causal, window, self.added.dtype)
        )

    def additive_mask(self, causal: bool, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores."""
        own = super().additive_mask(causal, window, dtype)
        return own if self.added is None else own + self.added.to(own)


def attention_context(
    attn: Any, query_input: Tensor, context: Any, layer: Any, *args: Any, **kwargs: Any
) -> CallContext:
    """The context of a call of attention with a cache entry, masks and a bias on the scores, in the order of these names."""
    names = ("past_kv_cache_entry", "additive_attention_mask", "attention_mask", "position_bias")
    arguments = _named(names, (context, None if type(layer) is int else layer, *args), kwargs)
    if arguments.get("position_bias") is not None and not getattr(attn.position_bias, "is_given", False):
        raise ValueError("this attention adds no position_bias to its scores; give additive_attention_mask")
    return CallContext(query_input, **arguments)


def block_context(resid_pre: Tensor, context: Any, *args: Any, **kwargs: Any) -> CallContext:
    """The context of a call of a block with a shortformer's positions, a cache entry, masks and a bias, in the order of these
    names."""
    names = (
        "shortformer_pos_embed",
        "past_kv_cache_entry",
        "attention_mask",
        "additive_attention_mask",
        "position_bias",
    )
    arguments = _named(names, (context, *args), kwargs)
    pos_embed = arguments.pop("shortformer_pos_embed", None)
    made = CallContext(resid_pre, **arguments)
    made.pos_embed = pos_embed
    return made


def _named(names: tuple[str, ...], positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name. Raises TypeError for one that is unknown, too many, or given twice."""
    by_place = dict(zip(names, positional, strict=False))
    twice = [name for name in named if by_place.get(name) is not None]
    if len(positional) > len(names) or named.keys() - {*names} or twice:
        raise TypeError(
            f"the arguments after the inputs are {', '.join(names)}, or a Context; got {[*by_place, *named]}"
        )
    return by_place | named
