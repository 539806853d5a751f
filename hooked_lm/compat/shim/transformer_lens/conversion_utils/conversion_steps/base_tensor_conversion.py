"""The base class of conversions."""

from hooked_lm.compat.conversions import BaseTensorConversion
