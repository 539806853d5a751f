"""The unembedding."""

from hooked_lm.compat.parts import Unembed
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
from transformer_lens.utilities.addmm import batch_addmm
