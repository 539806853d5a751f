"""Configs."""

from hooked_lm.models.config import HookedTransformerConfig
