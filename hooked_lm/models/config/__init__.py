"""The configs: the tree that builds a model, and the flat names that users know."""
