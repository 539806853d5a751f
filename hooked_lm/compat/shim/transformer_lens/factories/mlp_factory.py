"""The factory of MLPs."""

from hooked_lm.compat.parts import MLP, CanBeUsedAsMLP, GatedMLP, GatedMLP4Bit, GptOssMoE, MLPFactory, MoE
from hooked_lm.models.config.flat import HookedTransformerConfig
