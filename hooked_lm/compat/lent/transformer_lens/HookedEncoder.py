"""The encoder."""

from hooked_lm.models.encoder import HookedEncoder
