"""The config in flat names."""

from hooked_lm.models.config import HookedTransformerConfig as TransformerLensConfig
