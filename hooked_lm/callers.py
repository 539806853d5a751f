"""Who called the package, for warnings that point there."""

from types import FrameType


def stacklevel_outside(frame: FrameType) -> int:
    """The `stacklevel` of a warning in this frame that points to the caller of this package; jaxtyping's frames are skipped."""
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("hooked_lm.", "jaxtyping.")):
        level, frame = level + 1, frame.f_back
    return level
