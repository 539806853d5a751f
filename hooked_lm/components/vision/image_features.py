"""What a decoder reads of images: a vector for each image token."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from hooked_lm.components.vision.patches import first_ones


@dataclass(frozen=True)
class ImageFeatures:
    """The vectors of image tokens [image, token, d_model].

    `counts` are the numbers of those of each image that are no padding, which is at the end; None: all. `cells` are the row and
    column of each token in the grid of its image [image, token, 2], -1 for a token that is no place of it, such as a class token.
    `deepstack` are further vectors of the tokens, which the first layers of the decoder add to its stream.
    """

    vectors: Float[Tensor, "image token d_model"]
    cells: Int[Tensor, "image token 2"]
    counts: tuple[int, ...] | None = None
    deepstack: tuple[Float[Tensor, "image token d_model"], ...] = ()

    @property
    def n_tokens(self) -> list[int]:
        """The number of tokens of each image."""
        n_images, longest = self.cells.shape[:2]
        return [longest] * n_images if self.counts is None else list(self.counts)

    @property
    def real(self) -> Bool[Tensor, "image token"] | None:
        """Which tokens are no padding; None: all."""
        return None if self.counts is None else first_ones(self.counts, self.cells.shape[1], self.cells.device)

    def in_order(self, vectors: Num[Tensor, "image token *width"]) -> Num[Tensor, "all_tokens *width"]:
        """Vectors of all images, one image after the other, without padding."""
        if self.counts is None:
            return vectors.flatten(0, 1)
        return torch.cat([of_image[:n] for of_image, n in zip(vectors, self.counts, strict=True)])
