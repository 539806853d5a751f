"""Learned position embeddings."""

from hooked_lm.compat.parts import PosEmbed
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.utils import get_offset_position_ids
