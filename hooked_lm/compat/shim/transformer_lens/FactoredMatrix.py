"""A product of two matrices in factored form."""

from hooked_lm.compat.types import TensorLike
from hooked_lm.factored_matrix import FactoredMatrix
