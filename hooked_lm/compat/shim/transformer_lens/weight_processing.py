"""Rewrites of weights that do not change the predictions."""

from hooked_lm.compat.processing import ProcessWeights
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.models.config.flat import HookedTransformerConfig as TransformerLensConfig
from transformer_lens.utilities import filter_dict_by_prefix
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
