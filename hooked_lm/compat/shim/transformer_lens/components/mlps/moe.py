"""Mixtures of experts."""

from hooked_lm.compat.parts import ActivationFunctionFactory, CanBeUsedAsMLP, MoE, MoEGatedMLP
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
