"""Logits as tokens, and as a table."""

from hooked_lm.compat.tensors import logits_to_df
from hooked_lm.models.generation.sampling import sample_logits
from hooked_lm.models.generation.sampling import without_repetition as _apply_repetition_penalty
