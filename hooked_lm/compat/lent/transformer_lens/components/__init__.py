"""The parts of a model."""
