"""A product of two matrices in factored form."""

from hooked_lm.factored_matrix import FactoredMatrix, TensorLike
