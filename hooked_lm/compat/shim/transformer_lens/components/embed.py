"""The token embedding."""

from hooked_lm.compat.parts import Embed, LayerNorm
from hooked_lm.models.config.flat import HookedTransformerConfig
