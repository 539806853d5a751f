"""Activation functions."""

from hooked_lm.compat.activations import (
    SOFTCAP_DISABLED,
    SUPPORTED_ACTIVATIONS,
    XIELU,
    ActivationFunction,
    apply_softcap,
    gelu_pytorch_tanh,
    softcap_enabled,
    xielu,
)
from hooked_lm.components.activations import relu2, solu
from hooked_lm.utils import gelu_fast, gelu_new
