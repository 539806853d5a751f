"""RMSNorm without a weight."""

from hooked_lm.compat.parts import RMSNormPre
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
