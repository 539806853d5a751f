"""Linear maps of heads."""

from hooked_lm.compat.linear import clamp_qkv, complex_attn_linear, simple_attn_linear
