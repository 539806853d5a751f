"""Checks of the identities between a model's sites, for each kind of model."""
