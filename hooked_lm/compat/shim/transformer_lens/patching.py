"""Activation patching."""

from torch import Tensor as CorruptedActivation
from torch import Tensor as Logits
from torch import Tensor as PatchedActivation

from hooked_lm.compat.types import AxisNames
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.patching import *  # noqa: F403
from hooked_lm.pretrained import HookedTransformer
