"""The config in flat names."""

from hooked_lm.models.config.flat import HookedTransformerConfig as TransformerLensConfig
