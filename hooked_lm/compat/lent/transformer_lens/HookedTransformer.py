"""The decoder."""

from jaxtyping import Float
from torch import Tensor

from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.activation_cache import ActivationCache
from hooked_lm.models.config import HookedTransformerConfig
from hooked_lm.models.decoder import HookedTransformer, Output
from hooked_lm.utils import USE_DEFAULT_VALUE

SingleLoss = Float[Tensor, ""]
LossPerToken = Float[Tensor, "batch pos_minus_1"]
Loss = SingleLoss | LossPerToken
