"""Scaled LLaMA: LLaMA whose embedding is multiplied by a number of the config."""
