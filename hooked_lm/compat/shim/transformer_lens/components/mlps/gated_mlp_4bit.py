"""The gated MLP with weights of 4 bits, which is refused."""

from hooked_lm.compat.parts import CanBeUsedAsMLP, GatedMLP4Bit
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
