"""Predictions for a prompt."""

from hooked_lm.utils import test_prompt
