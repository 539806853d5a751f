"""The key/value cache of one layer."""

from hooked_lm.components.kv_cache import KeyValueCacheEntry as TransformerLensKeyValueCacheEntry
from hooked_lm.models.config.flat import HookedTransformerConfig as TransformerLensConfig
