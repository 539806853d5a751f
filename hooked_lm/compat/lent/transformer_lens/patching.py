"""Activation patching."""

from hooked_lm.patching import *  # noqa: F403
