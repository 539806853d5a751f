"""The flat config."""

from hooked_lm.compat.bridge import TransformerBridgeConfig
from hooked_lm.models.config.flat import HookedTransformerConfig as TransformerLensConfig
from transformer_lens.utilities import SOFTCAP_DISABLED
