"""The attention of encoder-decoders."""

from hooked_lm.compat.parts import AbstractAttention, T5Attention
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
