"""Names of sites."""

from hooked_lm.models.names import get_act_name
