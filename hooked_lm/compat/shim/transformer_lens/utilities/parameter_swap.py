"""Temporary values of parameters."""

from hooked_lm.compat.modules import temporarily_swap_parameter
