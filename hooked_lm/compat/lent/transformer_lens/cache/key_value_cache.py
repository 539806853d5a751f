"""The cache of all layers."""

from hooked_lm.components.kv_cache import KeyValueCache as TransformerLensKeyValueCache
