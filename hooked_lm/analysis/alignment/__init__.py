"""Alignment: the subspace of a site that represents a causal variable, and interchange interventions on it."""
