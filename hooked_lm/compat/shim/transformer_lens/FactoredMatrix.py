"""A product that is never multiplied out."""

from hooked_lm.compat.types import TensorLike
from hooked_lm.factored_matrix import FactoredMatrix
