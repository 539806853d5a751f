"""Weights of the first SoLU models by the parameter names of TransformerLens."""

from hooked_lm.hub.tl_weights import from_early_solu as convert_neel_solu_old_weights
from hooked_lm.models.config.flat import HookedTransformerConfig
