"""What only a decoder has: positions that depend on earlier ones alone, and logits after a norm."""

from torch import nn

from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.vision_language import VisionLanguage


def decoder(model: nn.Module, needs: str) -> Decoder:
    """The model; raises TypeError unless it is a decoder. `needs` begins the message, as in "a graph needs"."""
    if not isinstance(model, Decoder):
        raise TypeError(f"{needs} a HookedTransformer, got a {type(model).__name__}")
    return model


def runs_as_written(model: Decoder) -> bool:
    """Whether a decoder has the forward pass of its class, and no other in a subclass."""
    return type(model).forward in (Decoder.forward, VisionLanguage.forward)
