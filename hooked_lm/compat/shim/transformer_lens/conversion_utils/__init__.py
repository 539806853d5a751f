"""Conversions of values for hooks."""
