"""Weights in the public names."""

from hooked_lm.compat.loading import convert_hf_weights as convert_qwen2_weights
from hooked_lm.models.config.flat import HookedTransformerConfig
