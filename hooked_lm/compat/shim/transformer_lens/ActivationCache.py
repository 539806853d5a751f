"""The cache of a run."""

from hooked_lm.hooks import Slice, SliceInput
from hooked_lm.models.caches.decoder import ActivationCache
from transformer_lens.utilities import warn_if_mps
