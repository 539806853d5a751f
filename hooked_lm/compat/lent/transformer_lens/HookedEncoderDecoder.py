"""The encoder-decoder."""

from hooked_lm.models.encoder_decoder import HookedEncoderDecoder
