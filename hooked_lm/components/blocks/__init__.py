"""Blocks: how attention, MLPs and mixers read the residual stream and write to it."""
