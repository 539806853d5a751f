"""The factory of activation functions."""

from hooked_lm.compat.parts import ActivationFunctionFactory
from hooked_lm.models.config.flat import HookedTransformerConfig
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS, XIELU, ActivationFunction
