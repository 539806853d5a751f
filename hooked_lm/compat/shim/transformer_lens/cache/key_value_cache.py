"""The key/value cache of all layers."""

from hooked_lm.components.kv_cache import KeyValueCache as TransformerLensKeyValueCache
from hooked_lm.components.kv_cache import KeyValueCacheEntry as TransformerLensKeyValueCacheEntry
from hooked_lm.models.config.flat import HookedTransformerConfig as TransformerLensConfig
from transformer_lens.utilities import get_device_for_block_index
