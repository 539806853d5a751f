"""Text and tokens: tokenizers, padding, and the methods for text of each kind of model."""
