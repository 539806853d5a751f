"""What can be read off a run: tools that are functions of tensors."""

from hooked_lm.analysis import metrics

__all__ = ["metrics"]
