"""What images change in a run of the decoder besides the embeddings: positions, masks."""

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from hooked_lm.components.vision.image_context import ImageContext
from hooked_lm.components.vision.image_features import ImageFeatures


class ImageRule(ABC):
    """A rule of one kind; its config is the rule itself. With `reads_suffix` it tells a prompt from the tokens after it."""

    reads_suffix: ClassVar[bool] = False

    @abstractmethod
    def apply(self, context: ImageContext, is_image: Bool[Tensor, "batch pos"], features: ImageFeatures | None) -> None:
        """Sets what the rule says in the context of a run; `features` are those of the images among its tokens."""
