"""Whole experiments, from prompts to an HTML page."""
