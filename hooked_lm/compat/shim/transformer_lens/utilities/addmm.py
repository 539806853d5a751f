"""Linear maps."""

from hooked_lm.compat.linear import batch_addmm, vanilla_addmm
