"""The cache of one layer."""

from hooked_lm.components.kv_cache import KeyValueCacheEntry as TransformerLensKeyValueCacheEntry
from hooked_lm.models.config.decoder import HookedTransformerConfig as TransformerLensConfig
