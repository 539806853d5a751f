"""The flat config."""

from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.flat import HookedTransformerConfig as TransformerLensConfig
from transformer_lens.utilities import SOFTCAP_DISABLED, SUPPORTED_ACTIVATIONS, get_device
