"""The encoder-decoder."""

from hooked_lm.compat.parts import MLP, Embed, GatedMLP, RMSNorm, T5Block, Unembed
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.pretrained import HookedEncoderDecoder
from transformer_lens import loading_from_pretrained as loading
from transformer_lens.utilities import TypedModuleList, devices, get_device_for_block_index, sample_logits, warn_if_mps
