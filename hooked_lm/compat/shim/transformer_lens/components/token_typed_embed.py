"""The token-type embedding."""

from hooked_lm.compat.parts import TokenTypeEmbed
from hooked_lm.models.config.flat import HookedTransformerConfig
