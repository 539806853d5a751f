"""Weights of checkpoints."""

from transformer_lens.pretrained import weight_conversions
