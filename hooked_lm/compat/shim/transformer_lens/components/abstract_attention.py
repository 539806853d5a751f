"""Attention of any kind."""

from hooked_lm.compat.parts import AbstractAttention, RMSNorm
from hooked_lm.components.kv_cache import KeyValueCacheEntry as HookedTransformerKeyValueCacheEntry
from hooked_lm.components.kv_cache import KeyValueCacheEntry as TransformerLensKeyValueCacheEntry
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
from transformer_lens.utilities import apply_softcap, get_offset_position_ids
from transformer_lens.utilities.attention import complex_attn_linear, simple_attn_linear
