"""Images as patches, the input of a vision tower, and pixels that are ready for it: floating point, scaled and normalised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.components.readable import is_readable

Grid = tuple[int, int]  # numbers of rows and columns


@dataclass(frozen=True)
class Patches:
    """Images cut into patches, row by row from the upper left.

    `vectors` are the pixels of each patch, by channel, row and column [image, patch, d_patch]; `grids` are the
    numbers of rows and columns of each image; they are no tensor, so that a run never waits for a device to know them. Images
    with fewer patches than others have padding at the end. `hidden` marks patches of the grid that no patch attends to, such as
    those right of a picture and below it; they have vectors like all others.
    """

    vectors: Float[Tensor, "image patch d_patch"]
    grids: tuple[Grid, ...]
    hidden: Bool[Tensor, "image patch"] | None = None

    @property
    def counts(self) -> tuple[int, ...] | None:
        """The number of patches of each image; None if none has fewer than others."""
        counts = tuple(rows * columns for rows, columns in self.grids)
        return None if all(n == self.vectors.shape[1] for n in counts) else counts

    @property
    def real(self) -> Bool[Tensor, "image patch"]:
        """Which patches are not padding."""
        n_images, n_patches = self.vectors.shape[:2]
        device, counts = self.vectors.device, self.counts
        return (
            torch.ones(n_images, n_patches, dtype=torch.bool, device=device)
            if counts is None
            else first_ones(counts, n_patches, device)
        )

    @property
    def cells(self) -> Int[Tensor, "image patch 2"]:
        """The row and column of each patch; of padding, those that it would have in a longer image."""
        return cells_in(self.grids, self.vectors.shape[1], self.vectors.device)

    @property
    def seen(self) -> Bool[Tensor, "image patch"]:
        """Which patches others attend to."""
        return self.real if self.hidden is None else self.real & ~self.hidden

    def repeated(self, n: int) -> "Patches":
        """The same images, `n` times one after the other."""
        found: dict[str, Any] = {
            name: torch.cat([x] * n) if isinstance(x, Tensor) else x and x * n for name, x in vars(self).items()
        }
        return replace(self, **found)


def of_images(rows: Sequence[Sequence[int]], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of some images: for each prompt that has images, their numbers."""
    numbers = torch.tensor([image for row in rows for image in row])
    return {name: x[numbers.to(x.device)] for name, x in tensors.items()}


def on_device(numbers: Sequence[object], device: torch.device) -> Int[Tensor, "*shape"]:
    """Whole numbers as a tensor, without waiting for the device."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=True)


def first_ones(counts: Sequence[int], length: int, device: torch.device) -> Bool[Tensor, "image place"]:
    """True at the first places of each image, as many as it has."""
    return torch.arange(length, device=device) < on_device(counts, device)[:, None]


def cells_in(grids: Sequence[Grid], length: int, device: torch.device) -> Int[Tensor, "image place 2"]:
    """The row and column of so many places in the grid of each image, row by row; those after the last are numbered on.

    >>> cells_in([(2, 2)], 4, torch.device("cpu")).tolist()
    [[[0, 0], [0, 1], [1, 0], [1, 1]]]
    """
    index = torch.arange(length, device=device)
    if len({columns for _, columns in grids}) == 1:
        columns = grids[0][1]
        return torch.stack([index // columns, index % columns], -1).expand(len(grids), -1, -1)
    widths = on_device([columns for _, columns in grids], device)[:, None]
    return torch.stack([index // widths, index % widths], -1)


def check_pixels(patches: Patches) -> None:
    """Raises TypeError for pixels that are not floating point, ValueError if there are none, and for NaN or infinite ones,
    where values can be read."""
    ready_pixels(patches.vectors)
    if not is_readable(patches.vectors):
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

    >>> cut(torch.zeros(2, 3, 8, 13), 4).grids
    ((2, 3), (2, 3))
    """
    n_images, _, height, width = pixels.shape
    rows, columns = height // size, width // size
    if not rows * columns:
        raise ValueError(f"an image of {height} x {width} pixels is smaller than a patch of {size} x {size}")
    squares = pixels[:, :, : rows * size, : columns * size].unflatten(3, (columns, size)).unflatten(2, (rows, size))
    vectors = squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return Patches(vectors, ((rows, columns),) * n_images)


READY = (
    "pixels that are ready are floating-point tensors or arrays, scaled and normalised; pictures go through the "
    "checkpoint's processor, as model.prepare does"
)


def is_ready(image: object) -> bool:
    """Whether this is a floating-point tensor or array."""
    if isinstance(image, np.ndarray):
        return np.issubdtype(image.dtype, np.floating)
    return isinstance(image, Tensor) and image.is_floating_point()


def ready_pixels(given: object, name: str = "pixel_values") -> Tensor:
    """Pixels that are ready, as a tensor. Raises TypeError for anything else, such as integers and pictures.

    >>> ready_pixels(torch.zeros(3, 2, 2, dtype=torch.uint8))
    Traceback (most recent call last):
    ...
    TypeError: pixel_values: got torch.uint8 [3, 2, 2]; pixels that are ready are floating-point tensors or arrays, scaled and \
normalised; pictures go through the checkpoint's processor, as model.prepare does
    """
    if not is_ready(given):
        raise TypeError(f"{name}: got {described(given)}; {READY}")
    return given if isinstance(given, Tensor) else torch.tensor(given)


def described(given: object) -> str:
    """A value in an error: the type and shape of a tensor, otherwise its type and beginning.

    >>> described("a.png"), described(torch.zeros(3, 2))
    ("str 'a.png'", 'torch.float32 [3, 2]')
    """
    if isinstance(given, (Tensor, np.ndarray)):
        return f"{given.dtype} {list(given.shape)}"
    text = repr(given)
    return f"{type(given).__name__} {text if len(text) < 40 else text[:37] + '...'}"
