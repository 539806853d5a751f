"""MLPs."""
