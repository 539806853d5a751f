"""The demonstrations: the bundled trained models, the generators of what they were trained on, and an experiment."""
