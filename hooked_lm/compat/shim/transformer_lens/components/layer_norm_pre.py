"""LayerNorm without weights."""

from hooked_lm.compat.parts import LayerNormPre
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
