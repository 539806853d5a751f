"""Causal experiments: what changes in what a model says when values inside it are exchanged."""

from hooked_lm.patching.classic import *  # noqa: F403
