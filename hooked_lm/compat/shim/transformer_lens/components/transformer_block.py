"""The block of decoders."""

from hooked_lm.compat.parts import (
    Attention,
    CanBeUsedAsMLP,
    GroupedQueryAttention,
    LayerNorm,
    LayerNormPre,
    MLPFactory,
    RMSNorm,
    RMSNormPre,
    TransformerBlock,
)
from hooked_lm.components.kv_cache import KeyValueCacheEntry as HookedTransformerKeyValueCacheEntry
from hooked_lm.components.kv_cache import KeyValueCacheEntry as TransformerLensKeyValueCacheEntry
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.utils import repeat_along_head_dimension
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
