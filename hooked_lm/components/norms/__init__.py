"""Norms: RMSNorm and LayerNorm, and what takes their place."""
