"""Names of models."""

from hooked_lm.compat.loading import DEFAULT_MODEL_ALIASES, MODEL_ALIASES, OFFICIAL_MODEL_NAMES
