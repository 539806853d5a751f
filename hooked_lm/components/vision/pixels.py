"""How the pixels of images are given: under the names, and in the shapes, of the processors of transformers."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.vision.patch_embed import PatchEmbed
from hooked_lm.components.vision.patches import Patches


@dataclass(frozen=True)
class PixelImages:
    """`pixel_values` [image, channel, height, width]: images of one size."""

    arguments: ClassVar[tuple[str, ...]] = ("pixel_values",)

    def patches(self, embed: PatchEmbed, pixel_values: Float[Tensor, "image channel height width"]) -> Patches:
        """The images as patches."""
        return embed.patches(pixel_values.to(embed.W_E.device))

    def drawn(
        self, embed: PatchEmbed.Config, grid: tuple[int, int], n_images: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Random images of a grid of patches, as arguments."""
        size = (grid[0] * embed.patch_size, grid[1] * embed.patch_size)
        return {"pixel_values": torch.randn(n_images, embed.n_channels, *size, generator=generator)}
