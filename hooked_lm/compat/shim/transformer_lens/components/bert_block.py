"""The block of encoders."""

from hooked_lm.compat.parts import Attention, BertBlock, LayerNorm, MLPFactory
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.utils import repeat_along_head_dimension
