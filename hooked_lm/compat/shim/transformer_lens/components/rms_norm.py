"""RMSNorm."""

from torch import Tensor as RMSNormInput

from hooked_lm.compat.parts import RMSNorm
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
