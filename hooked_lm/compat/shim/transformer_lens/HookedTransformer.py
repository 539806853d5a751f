"""The decoder."""

from hooked_lm.compat.loading import DTYPE_FROM_STRING, NON_HF_HOSTED_MODEL_NAMES
from hooked_lm.compat.parts import (
    MLP,
    Embed,
    GatedMLP,
    LayerNorm,
    LayerNormPre,
    PosEmbed,
    RMSNorm,
    RMSNormPre,
    TransformerBlock,
    Unembed,
)
from hooked_lm.compat.processing import ProcessWeights
from hooked_lm.compat.types import Loss, LossPerToken, SingleLoss
from hooked_lm.components.kv_cache import KeyValueCache as HookedTransformerKeyValueCache
from hooked_lm.components.kv_cache import KeyValueCache as TransformerLensKeyValueCache
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.loss import Output
from hooked_lm.pretrained import HookedTransformer
from transformer_lens import loading_from_pretrained as loading
from transformer_lens import utils
from transformer_lens.utilities import (
    USE_DEFAULT_VALUE,
    TypedModuleList,
    apply_softcap,
    devices,
    get_best_available_device,
    get_device_for_block_index,
    init_kaiming_normal_,
    init_kaiming_uniform_,
    init_xavier_normal_,
    init_xavier_uniform_,
    move_to_and_update_config,
    softcap_enabled,
)
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
