"""What prepares the prediction of masked tokens."""

from hooked_lm.compat.parts import BertMLMHead, LayerNorm
from hooked_lm.models.config.flat import HookedTransformerConfig
