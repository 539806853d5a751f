"""The HookedTransformer interface of `transformer_lens` 2.x and 3.x, answered by hooked_lm."""

from importlib.metadata import version

from transformer_lens import components, head_detector, hook_points, patching, utils
from transformer_lens.ActivationCache import ActivationCache
from transformer_lens.BertNextSentencePrediction import BertNextSentencePrediction
from transformer_lens.FactoredMatrix import FactoredMatrix
from transformer_lens.HookedEncoder import HookedEncoder
from transformer_lens.HookedEncoderDecoder import HookedEncoderDecoder
from transformer_lens.HookedRootModule import HookedRootModule
from transformer_lens.HookedTransformer import HookedTransformer
from transformer_lens.HookedTransformerConfig import HookedTransformerConfig
from transformer_lens.SVDInterpreter import SVDInterpreter

__version__ = version("transformer_lens")
