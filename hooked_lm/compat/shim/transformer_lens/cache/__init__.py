"""The key/value cache."""

from hooked_lm.components.kv_cache import KeyValueCache as TransformerLensKeyValueCache
from hooked_lm.components.kv_cache import KeyValueCacheEntry as TransformerLensKeyValueCacheEntry
