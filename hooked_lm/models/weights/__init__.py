"""Weights of whole models: stacked views, folding, initialisation, state dicts."""
