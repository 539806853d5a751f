"""Weights of a minGPT by the parameter names of TransformerLens."""

from hooked_lm.hub.tl_weights import from_mingpt as convert_mingpt_weights
from hooked_lm.models.config.flat import HookedTransformerConfig
