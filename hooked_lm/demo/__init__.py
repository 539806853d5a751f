"""The demonstration: the bundled trained model, the generator of its training text, and an experiment on it."""
