"""What images change in a run of the decoder besides the embeddings: positions, masks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from hooked_lm.components.vision.image_context import ImageContext, ImageFeatures


class ImageRule(ABC):
    """A rule of one kind; its config is the rule itself. With `reads_suffix` it tells a prompt from the tokens after it."""

    reads_suffix: ClassVar[bool] = False

    @abstractmethod
    def apply(self, context: ImageContext, is_image: Bool[Tensor, "batch pos"], features: ImageFeatures | None) -> None:
        """Sets what the rule says in the context of a run; `features` are those of the images among its tokens."""


@dataclass(frozen=True)
class AxisPositions(ImageRule):
    """Positions in time, row and column: a word has the same on all axes, one more than the word before it.

    An image begins where a word would be. Its tokens have this position in time, plus their row and their column; the text after
    it continues after the largest of them. A key/value cache keeps what images add to the positions of later text.
    """

    def apply(self, context: ImageContext, is_image: Bool[Tensor, "batch pos"], features: ImageFeatures | None) -> None:
        if context.shift is not None and len(context.shift) != len(is_image):
            raise ValueError(f"the cache has {len(context.shift)} rows, the new tokens have {len(is_image)}")
        if features is None:
            return
        shift = context.positions.new_zeros(len(is_image)) if context.shift is None else context.shift.clone()
        positions = (context.positions + shift[:, None]).repeat(3, 1, 1)
        of_images = features.cells.cpu()  # read once, as is `is_image`: all images may be of different sizes
        for image, (row, first, last) in enumerate(spans(is_image.cpu(), features.n_tokens)):
            cells, of_image = of_images[image, : last + 1 - first], positions[:, row, first : last + 1]
            of_image[:] = of_image[0, :1].clone()
            of_image[1:] += cells.T.to(positions.device, non_blocking=True)
            moved = int(cells.max()) - (last - first)
            positions[:, row, last + 1 :] += moved
            shift[row] += moved
        context.shift, context.axis_positions = shift, positions
        if context.cache is not None:
            context.cache.position_shifts[context.n_key] = shift


def spans(is_image: Bool[Tensor, "batch pos"], n_tokens: list[int]) -> list[tuple[int, int, int]]:
    """The row, and the first and last position, of each image with so many tokens.

    Raises ValueError for an image whose tokens do not follow one another in one row.

    >>> spans(torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]).bool(), [1, 2, 2])
    [(0, 1, 1), (0, 2, 3), (1, 0, 1)]
    """
    places, ends = is_image.nonzero(), torch.tensor(n_tokens).cumsum(0)
    starts = ends - torch.tensor(n_tokens)
    found = torch.cat([places[starts], places[ends - 1]], 1).tolist()
    for image, (row, first, last_row, last) in enumerate(found):
        if row != last_row or last - first + 1 != n_tokens[image]:
            raise ValueError(
                f"the {n_tokens[image]} tokens of image {image} must follow one another in one row, but they begin at "
                f"position {first} of row {row} and end at position {last} of row {last_row}"
            )
    return [(row, first, last) for row, first, _, last in found]


@dataclass(frozen=True)
class BidirectionalImages(ImageRule):
    """Image tokens without others between them see each other in both directions (Gemma 3)."""

    def apply(self, context: ImageContext, is_image: Bool[Tensor, "batch pos"], features: ImageFeatures | None) -> None:
        if is_image.shape[1] > 1 and features is not None:
            begins = is_image & ~F.pad(is_image, (1, 0))[:, :-1]
            context.groups = torch.where(is_image, begins.long().cumsum(1), -1)


@dataclass(frozen=True)
class BidirectionalPrefix(ImageRule):
    """All tokens of a prompt see each other in both directions, also beyond windows; tokens after it see what is before them.

    Those are the tokens of `context.suffix`, and after a cache all tokens, unless they come with images. Positions start at
    `first_position` (PaliGemma, Beyer et al. 2024, arXiv:2407.07726).
    """

    reads_suffix = True
    first_position: int = 1

    def apply(self, context: ImageContext, is_image: Bool[Tensor, "batch pos"], features: ImageFeatures | None) -> None:
        context.key_positions = context.key_positions + self.first_position
        context.positions = context.positions + self.first_position
        if is_image.shape[1] == 1 or (context.n_past and features is None):
            return
        real = context.new_real()
        outside = torch.zeros_like(is_image) if context.suffix is None else context.suffix
        outside = outside if real is None else outside | ~real
        context.groups, context.windows_end_groups = torch.where(outside, -1, 0), False
