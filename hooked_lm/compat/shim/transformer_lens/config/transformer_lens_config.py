"""The config in flat names."""

from hooked_lm.models.config.decoder import HookedTransformerConfig as TransformerLensConfig
