"""Keys and values of tokens that were read."""

from hooked_lm.components.kv_cache import (
    KeyValueCache as HookedTransformerKeyValueCache,
)
from hooked_lm.components.kv_cache import (
    KeyValueCacheEntry as HookedTransformerKeyValueCacheEntry,
)
