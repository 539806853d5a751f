"""The head for next-sentence prediction."""

from hooked_lm.compat.parts import BertNSPHead
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
