"""The config in flat names."""

from hooked_lm.models.config.decoder import HookedTransformerConfig
from hooked_lm.models.config.decoder import HookedTransformerConfig as TransformerLensConfig
from transformer_lens.utilities import SOFTCAP_DISABLED, SUPPORTED_ACTIVATIONS, get_device
