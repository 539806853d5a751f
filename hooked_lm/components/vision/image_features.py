"""What a decoder reads of images: a vector for each image token."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class ImageFeatures:
    """The vectors of image tokens [image, token, d_model].

    `real` marks those that are no padding; None: all. `cells` are the row and column of each token in the grid of its image
    [image, token, 2], -1 for a token that is no place of it, such as a class token. `deepstack` are further vectors of the
    tokens, which the first layers of the decoder add to its stream.
    """

    vectors: Float[Tensor, "image token d_model"]
    cells: Int[Tensor, "image token 2"]
    real: Bool[Tensor, "image token"] | None = None
    deepstack: tuple[Float[Tensor, "image token d_model"], ...] = ()

    @property
    def n_tokens(self) -> list[int]:
        """The number of tokens of each image."""
        n_images, longest = self.cells.shape[:2]
        return [longest] * n_images if self.real is None else self.real.sum(1).tolist()

    def in_order(self, vectors: Float[Tensor, "image token *width"]) -> Float[Tensor, "all_tokens *width"]:
        """Vectors of all images, one image after the other, without padding."""
        return vectors.flatten(0, 1) if self.real is None else vectors[self.real]
