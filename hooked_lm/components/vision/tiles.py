"""Images cut into tiles (LLaVA-NeXT, Liu et al. 2024): the whole image in one tile, and at a higher resolution in several."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.vision.patch_embed import PatchEmbed
from hooked_lm.components.vision.patches import Patches

Size = tuple[int, int]  # height and width


@dataclass(frozen=True)
class TilePatches(Patches):
    """The patches of tiles; each tile is an image of the tower.

    Of each image there are its size in pixels, and how many rows and columns of tiles follow the tile that shows all of it.
    """

    sizes: tuple[Size, ...] = field(kw_only=True)
    tile_grids: tuple[Size, ...] = field(kw_only=True)

    @property
    def n_tiles(self) -> list[int]:
        """The number of tiles of each image."""
        return [1 + rows * columns for rows, columns in self.tile_grids]


@dataclass(frozen=True)
class TileImages:
    """`pixel_values` [image, tile, channel, height, width], and `image_sizes` [image, 2]: height and width before resizing.

    The first tile shows the whole image, the others are its parts, row by row, at the best of the `resolutions`. Images with
    fewer tiles than others have empty ones at the end, all zero, which are not run.
    """

    tile_size: int
    resolutions: tuple[Size, ...]
    arguments: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")

    def patches(
        self,
        embed: PatchEmbed,
        pixel_values: Float[Tensor, "..."] | None = None,
        image_sizes: Int[Tensor, "..."] | None = None,
    ) -> TilePatches:
        """The tiles of all images, one image after the other, as patches. Raises ValueError if tiles and sizes do not fit."""
        if pixel_values is None or image_sizes is None:
            absent = "pixel_values" if pixel_values is None else "image_sizes"
            raise ValueError(f"images need both pixel_values and image_sizes, but there are no {absent}")
        if pixel_values.ndim != 5:
            raise ValueError(
                f"pixel_values must be [image, tile, channel, height, width], got {tuple(pixel_values.shape)}"
            )
        sizes = self._sizes(image_sizes, len(pixel_values))
        grids = tuple(self.tile_grid(size) for size in sizes)
        pixel_values = pixel_values.to(embed.W_E.device)
        tiles = [
            self._tiles_of(image, pixels, size, grid)
            for image, (pixels, size, grid) in enumerate(zip(pixel_values, sizes, grids, strict=True))
        ]
        cut = embed.patches(torch.cat(tiles))
        return TilePatches(cut.vectors, cut.grid, sizes=sizes, tile_grids=grids)

    def tile_grid(self, size: Size) -> Size:
        """How many rows and columns of tiles an image of this size has.

        >>> TileImages(24, ((24, 48), (48, 48))).tile_grid((20, 50))
        (1, 2)
        """
        height, width = best_resolution(size, self.resolutions)
        return height // self.tile_size, width // self.tile_size

    def _sizes(self, image_sizes: Tensor, n_images: int) -> tuple[Size, ...]:
        """The sizes of images, checked."""
        if image_sizes.shape != (n_images, 2):
            raise ValueError(
                f"image_sizes must be [image, 2] with {n_images} images, as pixel_values has, got {tuple(image_sizes.shape)}"
            )
        sizes = tuple((int(height), int(width)) for height, width in image_sizes.tolist())
        for image, (height, width) in enumerate(sizes):
            if min(height, width) < 1:
                raise ValueError(f"image {image} is empty: its size is {height} x {width} pixels")
        return sizes

    def _tiles_of(self, image: int, tiles: Tensor, size: Size, grid: Size) -> Tensor:
        """The tiles of an image without empty ones at the end."""
        n, given = 1 + grid[0] * grid[1], len(tiles)
        if given > n:
            given = max([n, *(int(i) + 1 for i in tiles.flatten(1).any(1).nonzero())])
        if given != n:
            raise ValueError(
                f"image {image} of {size[0]} x {size[1]} pixels has {n} tiles, one and {grid[0]} x {grid[1]}, but pixel_values "
                f"has {given}"
            )
        return tiles[:n]

    def drawn(
        self, embed: PatchEmbed.Config, grid: tuple[int, int], n_images: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Random images of one size, which is padded in its resolution, as arguments."""
        height, width = max(self.resolutions, key=lambda size: (size[0] != size[1], -size[0] * size[1]))
        size = (height, max(width - 2 * embed.patch_size, 1))
        rows, columns = self.tile_grid(size)
        of_tile = (grid[0] * embed.patch_size, grid[1] * embed.patch_size)
        pixels = torch.randn(n_images, 1 + rows * columns, embed.n_channels, *of_tile, generator=generator)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([size] * n_images)}


def best_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """The resolution at which an image keeps most of its pixels; of several, the one with the least area beside it.

    >>> best_resolution((30, 50), [(24, 48), (48, 48), (72, 24)])
    (48, 48)
    """
    height, width = size

    def merit(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=merit)


def picture_in(grid: Size, size: Size) -> tuple[slice, slice]:
    """The rows and columns of a grid in which an image of this size lies, between padding on two sides.

    >>> picture_in((8, 8), (30, 50))
    (slice(2, 6, None), slice(0, 8, None))
    """
    (rows, columns), (height, width) = grid, size
    if width / height > columns / rows:  # rounded before it is cut off, as 5.9999999999 stands for 6
        margin = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(margin, rows - margin), slice(0, columns)
    margin = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(0, rows), slice(margin, columns - margin)
