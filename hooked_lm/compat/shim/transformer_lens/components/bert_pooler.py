"""The pooler."""

from hooked_lm.compat.parts import BertPooler
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
