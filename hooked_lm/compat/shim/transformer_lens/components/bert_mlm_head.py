"""The head for masked-token prediction, before the unembedding."""

from hooked_lm.compat.parts import BertMLMHead, LayerNorm
from hooked_lm.models.config.flat import HookedTransformerConfig
