"""The model class for each kind of config tree."""

from typing import Any, TypeVar

from hooked_lm.models.base import BaseModel
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.tree import (
    DecoderConfig,
    DualEncoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    VisionConfig,
    VisionLanguageConfig,
)
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.encoder import Encoder
from hooked_lm.models.encoder_decoder import EncoderDecoder
from hooked_lm.models.vision.dual_encoder import DualEncoder
from hooked_lm.models.vision.encoder import VisionEncoder
from hooked_lm.models.vision.vision_language import VisionLanguage

Model = Decoder | Encoder | EncoderDecoder | VisionEncoder | DualEncoder
Loaded = TypeVar("Loaded", bound=BaseModel)
_CLASSES: dict[type, type[Any]] = {
    DecoderConfig: Decoder,
    EncoderConfig: Encoder,
    EncoderDecoderConfig: EncoderDecoder,
    VisionConfig: VisionEncoder,
    VisionLanguageConfig: VisionLanguage,
    DualEncoderConfig: DualEncoder,
}


def model_class(tree: Tree) -> type[Any]:
    """The class in `hooked_lm.models` that a tree describes."""
    return _CLASSES[type(tree)]


def kept_part(model: BaseModel) -> str:
    """What a model that was loaded from a composite is of it."""
    return "vision tower" if isinstance(model, VisionEncoder) else "language model"
