"""The model class for each kind of config tree."""

from typing import Any

from hooked_lm.hub.options import Tree
from hooked_lm.models.config.tree import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.encoder import Encoder
from hooked_lm.models.encoder_decoder import EncoderDecoder

Model = Decoder | Encoder | EncoderDecoder
_CLASSES: dict[type, Any] = {DecoderConfig: Decoder, EncoderConfig: Encoder, EncoderDecoderConfig: EncoderDecoder}


def model_class(tree: Tree) -> Any:
    """The class in `hooked_lm.models` that a tree describes."""
    return _CLASSES[type(tree)]
