"""Which class of model a config tree becomes."""

from dataclasses import dataclass
from typing import Any

from hooked_lm.models.config.decoder import DecoderConfig, HookedTransformerConfig
from hooked_lm.models.config.encoder import EncoderConfig, HookedEncoderConfig
from hooked_lm.models.config.encoder_decoder import EncoderDecoderConfig, HookedEncoderDecoderConfig
from hooked_lm.models.decoder import HookedTransformer
from hooked_lm.models.encoder import HookedEncoder
from hooked_lm.models.encoder_decoder import HookedEncoderDecoder

Model = HookedTransformer | HookedEncoder | HookedEncoderDecoder
Tree = DecoderConfig | EncoderConfig | EncoderDecoderConfig


@dataclass(frozen=True)
class Kind:
    """A class of model, and the class of its flat config."""

    model: Any
    config: Any


KINDS: dict[type, Kind] = {
    DecoderConfig: Kind(HookedTransformer, HookedTransformerConfig),
    EncoderConfig: Kind(HookedEncoder, HookedEncoderConfig),
    EncoderDecoderConfig: Kind(HookedEncoderDecoder, HookedEncoderDecoderConfig),
}


def kind_of(tree: Tree, cls: type | None, model_name: str) -> Kind:
    """The kind of model that a tree becomes, as `cls` where the caller wants a subclass.

    Raises ValueError if `cls` is a class of another kind.
    """
    kind = KINDS[type(tree)]
    if cls is None:
        return kind
    if not issubclass(cls, kind.model):
        right = kind.model.__name__
        raise ValueError(f"{model_name!r} is no {cls.__name__}: load it with {right}.from_pretrained")
    return Kind(cls, kind.config)
