"""Conversions of values for hooks."""

from hooked_lm.compat.conversions import BaseTensorConversion
