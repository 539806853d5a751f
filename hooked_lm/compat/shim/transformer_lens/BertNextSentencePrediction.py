"""The head for next-sentence prediction."""

from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.next_sentence import BertNextSentencePrediction
from hooked_lm.pretrained import HookedEncoder
