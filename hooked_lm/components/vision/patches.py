"""Images as patches: the input of a vision tower."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Patches:
    """Images cut into patches, row by row from the upper left.

    `vectors` are the pixels of each patch, by channel, row and column [image, patch, d_patch]; `grid` is the number of rows
    and columns of each image [image, 2]. Images with fewer patches than others have padding at the end. `hidden` marks patches
    of the grid that no patch attends to, such as those right of a picture and below it; they have vectors like all others.
    """

    vectors: Float[Tensor, "image patch d_patch"]
    grid: Int[Tensor, "image 2"]
    hidden: Bool[Tensor, "image patch"] | None = None

    @property
    def n_patches(self) -> Int[Tensor, " image"]:
        """The number of patches of each image."""
        return self.grid.prod(1)

    @property
    def real(self) -> Bool[Tensor, "image patch"]:
        """Which patches are not padding."""
        return torch.arange(self.vectors.shape[1], device=self.grid.device) < self.n_patches[:, None]

    @property
    def padded(self) -> bool:
        """Whether some images have fewer patches than others."""
        return bool((self.n_patches < self.vectors.shape[1]).any())

    @property
    def cells(self) -> Int[Tensor, "image patch 2"]:
        """The row and column of each patch; of padding, those that it would have in a longer image."""
        index, columns = torch.arange(self.vectors.shape[1], device=self.grid.device), self.grid[:, 1:]
        return torch.stack([index // columns, index % columns], -1)

    @property
    def seen(self) -> Bool[Tensor, "image patch"]:
        """Which patches others attend to."""
        return self.real if self.hidden is None else self.real & ~self.hidden


class PerImage:
    """A way to give images in which every tensor has one entry for each image."""

    def select(self, rows: Sequence[Sequence[int]], **images: Tensor) -> dict[str, Tensor]:
        """The tensors of some images: for each prompt that has images, their numbers."""
        return of_images(rows, images)


def of_images(rows: Sequence[Sequence[int]], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of some images: for each prompt that has images, their numbers."""
    numbers = torch.tensor([image for row in rows for image in row])
    return {name: x[numbers.to(x.device)] for name, x in tensors.items()}


def check_pixels(patches: Patches) -> None:
    """Raises ValueError for images without pixels, and pixels that are NaN or infinite; nothing is checked in `torch.compile`."""
    if torch.compiler.is_compiling() or patches.vectors.is_meta:
        return
    if not patches.vectors[:1].numel() and len(patches.vectors):
        raise ValueError(f"there are no pixels: the patches of images are {tuple(patches.vectors.shape)}")
    bad = ~patches.vectors.isfinite().flatten(1)
    if bad.any():
        image = int(bad.any(1).nonzero()[0])
        raise ValueError(f"{int(bad[image].sum())} of {bad.shape[1]} pixel values of image {image} are NaN or infinite")


def cut(pixels: Float[Tensor, "image channel height width"], size: int) -> Patches:
    """Images of one size as patches of `size` x `size` pixels; what is left at the right and below is not read.

    Raises ValueError for images smaller than a patch.

    >>> cut(torch.zeros(2, 3, 8, 13), 4).grid.tolist()
    [[2, 3], [2, 3]]
    """
    n_images, _, height, width = pixels.shape
    rows, columns = height // size, width // size
    if not rows * columns:
        raise ValueError(f"an image of {height} x {width} pixels is smaller than a patch of {size} x {size}")
    squares = pixels[:, :, : rows * size, : columns * size].unflatten(3, (columns, size)).unflatten(2, (rows, size))
    vectors = squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return Patches(vectors, torch.tensor([rows, columns], device=pixels.device).repeat(n_images, 1))
