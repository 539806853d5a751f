"""Whether one sentence follows another."""

from hooked_lm.models.next_sentence import BertNextSentencePrediction
