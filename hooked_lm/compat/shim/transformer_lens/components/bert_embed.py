"""The embedding of an encoder."""

from hooked_lm.compat.parts import BertEmbed, Embed, LayerNorm, PosEmbed, TokenTypeEmbed
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
