"""Typed lists of modules."""

from hooked_lm.compat.modules import T, TypedModuleList
