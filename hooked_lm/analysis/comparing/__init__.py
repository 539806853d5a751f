"""Comparing a model with its fine-tune."""
