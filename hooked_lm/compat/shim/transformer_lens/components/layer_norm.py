"""LayerNorm."""

from hooked_lm.compat.parts import LayerNorm
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
