"""In-place initialisation of weights."""

from hooked_lm.compat.initialisers import (
    NonlinearityType,
    calc_fan_in_and_fan_out,
    init_kaiming_normal_,
    init_kaiming_uniform_,
    init_xavier_normal_,
    init_xavier_uniform_,
)
