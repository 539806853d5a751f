"""Attributes by dotted names."""

from hooked_lm.compat.attributes import get_nested_attr, set_nested_attr
