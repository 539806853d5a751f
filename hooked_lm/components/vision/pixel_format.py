"""How a family gives the pixels of images to its model: the tensors that its processor makes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.vision.patch_embed import PatchEmbed
from hooked_lm.components.vision.patches import Patches, of_images, ready_pixels

Size = tuple[int, int]  # height and width


class PixelFormat(ABC):
    """The tensors that describe images; its config is the format itself. `arguments` are their names, as in transformers."""

    arguments: ClassVar[tuple[str, ...]]

    @abstractmethod
    def patches(self, embed: PatchEmbed, *args: Any, **images: Any) -> Patches:
        """The images as patches. Raises ValueError for tensors that do not fit."""

    @abstractmethod
    def from_images(
        self, embed: PatchEmbed.Config, images: Sequence[Tensor], per_prompt: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """The tensors for normalised images [channel, height, width]; `per_prompt` is how many each prompt has, if known.

        Raises ValueError for images of a size that does not fit.
        """

    def ready(self, embed: PatchEmbed.Config, given: Mapping[str, object]) -> dict[str, Tensor]:
        """Images as arguments, all of them tensors. Pixels may be arrays, one image [channel, height, width], or a list of such.

        Raises TypeError for other arguments, and for pixels that are not ready.
        """
        found: dict[str, Tensor] = {}  # a spelling that compiles
        for name, value in given.items():
            if name not in self.arguments:
                raise TypeError(f"this model reads no {name!r}: images are {', '.join(self.arguments)}")
            if isinstance(value, (list, tuple)) and name == "pixel_values":
                images = [ready_pixels(image, f"image {i} of {name}") for i, image in enumerate(value)]
                if not images:
                    raise ValueError(f"there are no images: {name} is an empty list")
                check_images(images, embed.n_channels)
                found = {**self.from_images(embed, images), **found}
            elif name.startswith("pixel_values"):
                pixels = ready_pixels(value, name)
                found[name] = pixels if pixels.ndim != 3 else pixels[None]
            else:
                found[name] = torch.as_tensor(value)
        return found

    @abstractmethod
    def select(self, rows: Sequence[Sequence[int]], *args: Any, **images: Any) -> dict[str, Tensor]:
        """The tensors of some images: for each prompt that has images, their numbers."""

    def size_drawn(self, embed: PatchEmbed.Config, size: Size) -> Size:
        """The size of random images, for a tower whose patches fill images of this size."""
        return size

    def drawn(
        self, embed: PatchEmbed.Config, grid: Size, n_images: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Random images of one size, as arguments."""
        size = self.size_drawn(embed, (grid[0] * embed.patch_size, grid[1] * embed.patch_size))
        return self.from_images(embed, list(torch.randn(n_images, embed.n_channels, *size, generator=generator)))


class ImageByImage(PixelFormat):
    """A format whose tensors have one entry for each image."""

    def select(self, rows: Sequence[Sequence[int]], **images: Tensor) -> dict[str, Tensor]:
        """The tensors of some images: for each prompt that has images, their numbers."""
        return of_images(rows, images)


def padded_images(
    images: Sequence[Tensor],
) -> tuple[Float[Tensor, "image channel height width"], Int[Tensor, "image 2"]]:
    """Images with zeros below and at the right, to the size of the largest, and their sizes."""
    sizes = torch.tensor([image.shape[-2:] for image in images])
    height, width = sizes.amax(0).tolist()
    padded = [F.pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2])) for image in images]
    return torch.stack(padded), sizes


def check_images(images: Sequence[Tensor], n_channels: int) -> None:
    """Raises ValueError for another shape than [channel, height, width], and for values that are NaN or infinite."""
    for i, image in enumerate(images):
        if image.ndim != 3 or len(image) != n_channels:
            hint = "; a picture [height, width, channel] is of integers" if image.shape[-1:] == (n_channels,) else ""
            raise ValueError(
                f"image {i} must be [channel, height, width] with {n_channels} channels, got {tuple(image.shape)}{hint}"
            )
        if n_bad := int((~image.isfinite()).sum()):
            raise ValueError(f"{n_bad} of {image.numel()} pixel values of image {i} are NaN or infinite")


def check_multiples(images: Sequence[Tensor], size: int) -> None:
    """Raises ValueError for an image whose height or width is no multiple of `size` pixels."""
    for i, (height, width) in enumerate(image.shape[-2:] for image in images):
        if height % size or width % size or not height * width:
            raise ValueError(
                f"image {i} has {height} x {width} pixels: height and width must be multiples of {size}; resize or pad it"
            )
