"""Positions in a cache of keys and values."""

from typing import Any

__all__ = ["get_pos_offset"]


def get_pos_offset(past_kv_cache: Any, batch_size: int) -> int:
    """The number of cached positions, which is the position of the next token; 0 without a cache.

    >>> from hooked_lm.components.kv_cache import KeyValueCache
    >>> get_pos_offset(KeyValueCache(n_layers=2), batch_size=1)
    0
    """
    return 0 if past_kv_cache is None else past_kv_cache.length
