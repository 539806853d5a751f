"""Training."""

from hooked_lm.compat.train import HookedTransformerTrainConfig, train
from transformer_lens import utils
from transformer_lens.HookedTransformer import HookedTransformer
from transformer_lens.utilities.library_utils import is_library_available
