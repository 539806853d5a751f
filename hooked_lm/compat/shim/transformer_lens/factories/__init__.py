"""Factories of components."""

from transformer_lens.factories import activation_function_factory, mlp_factory
