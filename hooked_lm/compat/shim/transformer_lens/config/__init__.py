"""Flat configs."""

from hooked_lm.compat.bridge import TransformerBridgeConfig
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.flat import HookedTransformerConfig as TransformerLensConfig
