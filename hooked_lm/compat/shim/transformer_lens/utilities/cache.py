"""Positions in a cache of keys and values."""

from hooked_lm.compat.positions import get_pos_offset
from hooked_lm.components.kv_cache import KeyValueCache as TransformerLensKeyValueCache
