"""Configs in flat names."""

from hooked_lm.compat.bridge import TransformerBridgeConfig
from hooked_lm.models.config.decoder import HookedTransformerConfig
from hooked_lm.models.config.decoder import HookedTransformerConfig as TransformerLensConfig
