"""The cache of a run."""

from hooked_lm.models.activation_cache import ActivationCache
