"""The flat config."""

from hooked_lm.models.config.flat import HookedTransformerConfig
from transformer_lens import utils
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS
