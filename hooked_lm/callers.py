"""Who called the package, for warnings that point there."""

import sys


def stacklevel_outside() -> int:
    """The `stacklevel` of a warning here that points to the caller of this package; jaxtyping's frames are skipped."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("hooked_lm.", "jaxtyping.")):
        level, frame = level + 1, frame.f_back
    return level
