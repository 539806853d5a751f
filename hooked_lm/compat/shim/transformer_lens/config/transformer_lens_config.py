"""The flat config."""

from hooked_lm.models.config.flat import HookedTransformerConfig as TransformerLensConfig
