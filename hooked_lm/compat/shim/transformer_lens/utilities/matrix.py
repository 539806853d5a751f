"""Factored matrices."""

from hooked_lm.compat.tensors import get_matrix_corner
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.utils import composition_scores, get_corner
