"""Singular vectors of a model's weights."""

from hooked_lm.analysis.reading.svd_interpreter import VECTOR_TYPES, SVDInterpreter
from hooked_lm.compat.types import OUTPUT_EMBEDDING
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.pretrained import HookedTransformer
