"""Parameters that hold other values for a while."""

from hooked_lm.compat.modules import temporarily_swap_parameter
