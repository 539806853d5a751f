"""Attention whose heads share keys and values."""

from hooked_lm.compat.parts import AbstractAttention, GroupedQueryAttention, RMSNorm
from hooked_lm.models.config.flat import HookedTransformerConfig
from transformer_lens.utilities.attention import complex_attn_linear, simple_attn_linear
