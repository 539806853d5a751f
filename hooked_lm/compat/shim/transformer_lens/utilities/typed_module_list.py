"""Lists of modules of one type."""

from hooked_lm.compat.modules import T, TypedModuleList
