"""The interface of `transformer_lens` 2.x and 3.x, implemented by hooked_lm."""

from importlib.metadata import version

from hooked_lm.compat.tokenizers import with_specials
from hooked_lm.models.config import defaults
from transformer_lens import (
    components,
    evals,
    factories,
    head_detector,
    hook_points,
    patching,
    supported_models,
    train,
    utilities,
    utils,
)
from transformer_lens import loading_from_pretrained as loading
from transformer_lens.ActivationCache import ActivationCache
from transformer_lens.BertNextSentencePrediction import BertNextSentencePrediction
from transformer_lens.cache import TransformerLensKeyValueCache, TransformerLensKeyValueCacheEntry
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.FactoredMatrix import FactoredMatrix
from transformer_lens.HookedEncoder import HookedEncoder
from transformer_lens.HookedEncoderDecoder import HookedEncoderDecoder
from transformer_lens.HookedRootModule import HookedRootModule
from transformer_lens.HookedTransformer import HookedTransformer
from transformer_lens.HookedTransformer import HookedTransformer as EasyTransformer
from transformer_lens.HookedTransformerConfig import HookedTransformerConfig
from transformer_lens.HookedTransformerConfig import HookedTransformerConfig as EasyTransformerConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.past_key_value_caching import HookedTransformerKeyValueCache, HookedTransformerKeyValueCacheEntry
from transformer_lens.past_key_value_caching import HookedTransformerKeyValueCache as EasyTransformerKeyValueCache
from transformer_lens.past_key_value_caching import (
    HookedTransformerKeyValueCacheEntry as EasyTransformerKeyValueCacheEntry,
)
from transformer_lens.SVDInterpreter import SVDInterpreter

__version__ = version("transformer_lens")
defaults.fused_attention = "never"  # recording changes no bit of a result, as in TransformerLens
defaults.padding_side = None  # texts are padded where the tokenizer says
defaults.tokenizer_for = with_specials  # which prepends BOS and can pad
