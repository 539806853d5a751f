"""Weights of a minGPT in the public names."""

from hooked_lm.hub.tl_weights import from_mingpt as convert_mingpt_weights
from hooked_lm.models.config.flat import HookedTransformerConfig
