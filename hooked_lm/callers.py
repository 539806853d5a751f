"""Warnings that point to who called the package."""

import sys
import warnings


def warn_caller(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warns, with the line that called this package as the place; jaxtyping's frames are skipped."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("hooked_lm.", "jaxtyping.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
