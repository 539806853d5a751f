"""Attention with keys and values for each head."""

from hooked_lm.compat.parts import AbstractAttention, Attention
from hooked_lm.models.config.flat import HookedTransformerConfig
