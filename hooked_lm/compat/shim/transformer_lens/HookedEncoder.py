"""The encoder."""

from hooked_lm.compat.parts import (
    MLP,
    Attention,
    BertBlock,
    BertEmbed,
    BertMLMHead,
    BertNSPHead,
    BertPooler,
    GatedMLP,
    Unembed,
)
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.pretrained import HookedEncoder
from transformer_lens import loading_from_pretrained as loading
from transformer_lens.utilities import TypedModuleList, devices
