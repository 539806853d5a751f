"""Attention and blocks called by themselves, with the arguments of the public interface instead of a `Context`."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter

from hooked_lm.components.kv_cache import KeyValueCache, KeyValueCacheEntry
from hooked_lm.components.source import StackContext

F = TypeVar("F", bound=Callable[..., Any])
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


def _is_foreign(context: Any) -> bool:
    """Whether in the place of a context stands what the public interface has there."""
    return type(context) in (Tensor, Parameter, KeyValueCacheEntry)


def _named(names: tuple[str, ...], given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name. Raises TypeError for one that is unknown, too many, or given twice."""
    by_place = dict(zip(names, given, strict=False))
    twice = [name for name in named if by_place.get(name) is not None]
    if len(given) > len(names) or named.keys() - {*names} or twice:
        raise TypeError(
            f"the arguments after the inputs are {', '.join(names)}, or a Context; got {[*by_place, *named]}"
        )
    return by_place | named


def public_attention(forward: F) -> F:
    """An attention's `forward` that takes the public arguments too: a cache entry, masks and a bias on the scores."""
    names = ("past_kv_cache_entry", "additive_attention_mask", "attention_mask", "position_bias")

    @wraps(forward)
    def call(
        self: Any,
        query_input: Tensor,
        key_input: Any = None,
        value_input: Any = None,
        context: Any = None,
        layer: Any = 0,
        *given: Any,
        **named: Any,
    ) -> Any:
        if type(layer) is int and not given and not named and not _is_foreign(context):
            return forward(self, query_input, key_input, value_input, context, layer)
        arguments = _named(names, (context, None if type(layer) is int else layer, *given), named)
        if arguments.get("position_bias") is not None and not getattr(self.position_bias, "is_given", False):
            raise ValueError("this attention adds no position_bias to its scores; give additive_attention_mask")
        return forward(
            self, query_input, key_input, value_input, CallContext(query_input, **arguments), self.layer_id or 0
        )

    return call  # type: ignore[return-value]


def public_block(forward: F) -> F:
    """A block's `forward` that takes the public arguments too: a shortformer's positions, a cache entry, and masks."""
    names = (
        "shortformer_pos_embed",
        "past_kv_cache_entry",
        "attention_mask",
        "additive_attention_mask",
        "position_bias",
    )

    @wraps(forward)
    def call(self: Any, resid_pre: Tensor, context: Any = None, *given: Any, **named: Any) -> Any:
        if not given and not named and not _is_foreign(context):
            return forward(self, resid_pre, context)
        arguments = _named(names, (context, *given), named)
        pos_embed = arguments.pop("shortformer_pos_embed", None)
        made = CallContext(resid_pre, **arguments)
        made.pos_embed = pos_embed
        return forward(self, resid_pre, made)

    return call  # type: ignore[return-value]
