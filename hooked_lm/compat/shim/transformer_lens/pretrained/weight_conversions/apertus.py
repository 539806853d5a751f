"""Weights by the parameter names of TransformerLens."""

from hooked_lm.compat.loading import convert_hf_weights as convert_apertus_weights
from hooked_lm.models.config.flat import HookedTransformerConfig
