"""The demonstration: a small trained model in the box, the text it learned from, and an experiment on it."""
