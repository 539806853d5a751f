"""The cache of one layer."""

from hooked_lm.components.kv_cache import KeyValueCacheEntry as TransformerLensKeyValueCacheEntry
from hooked_lm.models.config import HookedTransformerConfig as TransformerLensConfig
