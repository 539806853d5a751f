"""Direct calls of attention and blocks with the arguments of the public interface instead of a `Context`."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.kv_cache import ContinuedEntry, KeyValueCache, KeyValueCacheEntry
from hooked_lm.components.masks import Scores
from hooked_lm.components.stack_context import EncodedSource, StackContext


class _OneEntry(KeyValueCache):
    """A cache with one entry for all layers."""

    def __init__(self, entry: KeyValueCacheEntry) -> None:
        super().__init__(0)
        self.entries = [entry]

    def __getitem__(self, layer: int) -> KeyValueCacheEntry | ContinuedEntry:
        return super().__getitem__(0)


class CallContext(StackContext):
    """The context of one call, with an optional additive attention mask."""

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
            raise ValueError(f"attention_mask has {real.shape[1]} positions, expected {self.n_key} with past ones")
        self.added_mask, self.score_bias = additive_attention_mask, position_bias


def attention_context(
    attn: nn.Module, query_input: Tensor, context: object, layer: object, *args: object, **kwargs: object
) -> CallContext:
    """The context of a call of attention; positional arguments are in the order of `names`."""
    names = ("past_kv_cache_entry", "additive_attention_mask", "attention_mask", "position_bias")
    arguments = _bind(names, (context, None if type(layer) is int else layer, *args), kwargs)
    own = getattr(attn, "position_bias", None)
    if arguments.get("position_bias") is not None and not getattr(own, "is_from_context", False):
        raise ValueError("this attention takes no position_bias; pass it as additive_attention_mask")
    return CallContext(query_input, **arguments)


BLOCK = ("shortformer_pos_embed", "past_kv_cache_entry", "attention_mask", "additive_attention_mask", "position_bias")


def block_context(resid_pre: Tensor, context: object, *args: object, **kwargs: object) -> CallContext:
    """The context of a call of a block; positional arguments are in the order of `BLOCK`."""
    return _context_of_block(resid_pre, _bind(BLOCK, (context, *args), kwargs))


def cross_block_context(resid_pre: Tensor, context: object, *args: object, **kwargs: object) -> CallContext:
    """The context of a call of a block with cross attention: also with the encoder's output and the mask of its positions."""
    arguments = _bind((*BLOCK, "encoder_hidden_states", "encoder_attention_mask"), (context, *args), kwargs)
    source = (arguments.pop("encoder_hidden_states", None), arguments.pop("encoder_attention_mask", None))
    if source[0] is None:
        raise ValueError("the cross attention of this block needs the encoder's output: give encoder_hidden_states")
    call_context = _context_of_block(resid_pre, arguments)
    call_context.source = _encoded(*source)
    return call_context


def _context_of_block(resid_pre: Tensor, arguments: dict[str, Any]) -> CallContext:
    pos_embed = arguments.pop("shortformer_pos_embed", None)
    call_context = CallContext(resid_pre, **arguments)
    call_context.pos_embed = pos_embed
    return call_context


def cross_context(query_input: Tensor, *args: object, **kwargs: object) -> StackContext:
    """The context of a call of cross attention with the source as `key_input`, and the mask of its positions."""
    arguments = _bind(("key_input", "value_input", "attention_mask"), args, kwargs)
    source = arguments["key_input"]
    if arguments.get("value_input", source) is not source:
        raise ValueError("keys and values of cross attention are of one source: give the same tensor for both")
    n_batch, n_pos = query_input.shape[:2]
    return StackContext(n_batch, n_pos, query_input.device, source=_encoded(source, arguments.get("attention_mask")))


def _encoded(resid: Tensor, attention_mask: Tensor | None = None) -> EncodedSource:
    """An encoder's output and the mask of its positions."""
    return EncodedSource(resid, None if attention_mask is None else attention_mask.to(resid.device).bool())


def _bind(names: tuple[str, ...], positional: tuple[object, ...], keywords: dict[str, object]) -> dict[str, Any]:
    """The arguments by name. Raises TypeError if one is unknown, repeated or too many."""
    by_name = dict(zip(names, positional, strict=False))
    twice = [name for name in keywords if by_name.get(name) is not None]
    if len(positional) > len(names) or keywords.keys() - {*names} or twice:
        raise TypeError(
            f"the arguments after the inputs are {', '.join(names)}, or a Context; got {[*by_name, *keywords]}"
        )
    return by_name | keywords
