"""The key/value cache."""

from hooked_lm.components.kv_cache import KeyValueCache as HookedTransformerKeyValueCache
from hooked_lm.components.kv_cache import KeyValueCacheEntry as HookedTransformerKeyValueCacheEntry
from hooked_lm.models.config.flat import HookedTransformerConfig
from transformer_lens.utilities.devices import get_device_for_block_index
