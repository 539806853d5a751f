"""Optional packages."""

from hooked_lm.compat.attributes import is_library_available
