"""Tensors."""

from hooked_lm.compat.tensors import (
    check_structure,
    filter_dict_by_prefix,
    get_cumsum_along_dim,
    is_lower_triangular,
    is_square,
    transpose,
)
from hooked_lm.utils import (
    get_corner,
    get_offset_position_ids,
    remove_batch_dim,
    repeat_along_head_dimension,
    to_numpy,
)
