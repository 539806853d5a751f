"""The base class of MLPs."""

from hooked_lm.compat.parts import ActivationFunctionFactory, CanBeUsedAsMLP, LayerNorm, LayerNormPre
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
from transformer_lens.utilities.activation_functions import ActivationFunction
