"""Chains of thought, sentence by sentence: which sentences matter for what follows."""
