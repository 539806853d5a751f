"""A look at what a model answers."""

from hooked_lm.utils import test_prompt
