"""The activation cache."""

from hooked_lm.hooks import Slice, SliceInput
from hooked_lm.models.caches.activation_cache import ActivationCache
from transformer_lens.utilities import warn_if_mps
