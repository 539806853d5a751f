"""Where images are in prompts: from a position of the text to a place in an image, and back."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.models.names import checked_index


@dataclass(frozen=True)
class ImagePositions:
    """The image, and the row and column in it, of each token of a batch of prompts.

    `cells` are these three numbers for each token [batch, pos, 3]; all are -1 for a word. Row or column are -1 for a token of
    an image that is no place of it, such as its class token or the end of a row. Rows and columns count the tokens of an image,
    each of which may stand for several patches. Images are numbered over the whole batch.

    >>> from hooked_lm.models.vision.image_positions import ImagePositions
    >>> places = ImagePositions(
    ...     torch.tensor([[[-1, -1, -1], [0, 0, 0], [0, 0, 1], [-1, -1, -1]]])
    ... )
    >>> places.cell(2), places.position(image=0, row=0, column=1), places.grid(0)
    ((0, 0, 1), (0, 2), tensor([[1, 2]]))
    """

    cells: Int[Tensor, "batch pos 3"]

    @cached_property
    def n_images(self) -> int:
        """The number of images of all prompts."""
        return int(self.cells[..., 0].max()) + 1

    def cell(self, position: int, prompt: int = 0) -> tuple[int, int, int]:
        """The image, row and column of a position of a prompt.

        Raises ValueError for a position that is no image token, and IndexError for one that the prompt does not have.
        """
        n_prompts, n_pos, _ = self.cells.shape
        at = (
            checked_index(prompt, n_prompts, "prompt", "the batch"),
            checked_index(position, n_pos, "position", "each prompt"),
        )
        image, row, column = self.cells[at].tolist()
        if image < 0:
            here = (self.cells[at[0], :, 0] >= 0).nonzero().flatten().tolist()
            known = f"its image tokens are at {_spans(here)}" if here else "it has none"
            raise ValueError(f"position {position} of prompt {prompt} is no image token; {known}")
        return image, row, column

    def position(self, image: int, row: int, column: int) -> tuple[int, int]:
        """The prompt of an image, and the position of a place in it.

        Raises ValueError for a place without a token, and IndexError for an image that there is not.
        """
        grid = self.grid(image)
        inside = 0 <= row < grid.shape[0] and 0 <= column < grid.shape[1]
        if not inside or grid[row, column] < 0:
            raise ValueError(
                f"image {image} has {grid.shape[0]} x {grid.shape[1]} tokens, and none at row {row}, column {column}"
            )
        return self.prompt(image), int(grid[row, column])

    def prompt(self, image: int) -> int:
        """The prompt that an image is in."""
        image = checked_index(image, self.n_images, "image", "the batch")
        return int((self.cells[..., 0] == image).any(1).nonzero()[0])

    def grid(self, image: int) -> Int[Tensor, "row column"]:
        """The positions of an image's places in its prompt; -1 for a place without a token.

        Where several tokens have the same place, as of a whole image and of its tiles, the last of them.
        """
        image = checked_index(image, self.n_images, "image", "the batch")
        own = self.cells[..., 0] == image
        places, positions = self.cells[own][:, 1:], own.nonzero()[:, 1]
        placed = (places >= 0).all(1)
        places, positions = places[placed], positions[placed]
        grid = positions.new_full(tuple((places.amax(0) + 1).tolist()) if len(places) else (0, 0), -1)
        for (row, column), position in zip(places.tolist(), positions.tolist(), strict=True):
            grid[row, column] = position
        return grid


def located(is_image: Tensor, n_tokens: list[int], cells: Int[Tensor, "all_tokens 2"]) -> ImagePositions:
    """The positions of images whose tokens are marked [batch, pos], from their places one image after the other."""
    numbers = torch.repeat_interleave(torch.tensor(n_tokens, dtype=torch.long)).to(cells.device)
    found = torch.full((*is_image.shape, 3), -1, device=cells.device)
    found[is_image.to(cells.device)] = torch.cat([numbers[:, None], cells], 1)
    return ImagePositions(found)


def _spans(positions: list[int]) -> str:
    """Ascending positions as ranges.

    >>> _spans([2, 3, 4, 8])
    '2-4, 8'
    """
    starts = [i for i in positions if i - 1 not in positions]
    ends = [i for i in positions if i + 1 not in positions]
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
