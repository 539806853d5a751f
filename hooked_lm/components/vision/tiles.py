"""Images cut into tiles (LLaVA-NeXT, Liu et al. 2024): the whole image in one tile, and at a higher resolution in several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hooked_lm.components.vision.patch_embed import PatchEmbed
from hooked_lm.components.vision.patches import Patches, of_images
from hooked_lm.components.vision.pixel_format import PixelFormat, Size


@dataclass(frozen=True)
class TilePatches(Patches):
    """The patches of tiles; each tile is an image of the tower.

    Of each image there are its size in pixels, and how many rows and columns of tiles follow the tile that shows all of it: none
    of an image in one tile.
    """

    sizes: tuple[Size, ...] = field(kw_only=True)
    tile_grids: tuple[Size, ...] = field(kw_only=True)

    @property
    def n_tiles(self) -> list[int]:
        """The number of tiles of each image."""
        return [1 + rows * columns for rows, columns in self.tile_grids]


@dataclass(frozen=True)
class TiledImages(PixelFormat):
    """Images as tiles: one that shows all of the image, and others at the best of the `resolutions`, which are its parts."""

    tile_size: int
    resolutions: tuple[Size, ...]

    def _checked(
        self, pixel_values: Tensor | None, image_sizes: Tensor | None, numbers: Tensor | None = None
    ) -> tuple[Tensor, tuple[Size, ...]]:
        """The tiles and the size of each image; `numbers` are those of images of prompts, if they matter."""
        if pixel_values is None or image_sizes is None:
            absent = "pixel_values" if pixel_values is None else "image_sizes"
            raise ValueError(f"images need both pixel_values and image_sizes, but there are no {absent}")
        if pixel_values.ndim == 4:
            pixel_values = self._by_image(pixel_values, image_sizes, numbers)
        if pixel_values.ndim != 5:
            raise ValueError(
                "pixel_values must be [image, tile, channel, height, width] or [tile, channel, height, width], got "
                f"{tuple(pixel_values.shape)}"
            )
        if not len(pixel_values):
            raise ValueError("pixel_values has no images: leave it out for text alone")
        return pixel_values, self._sizes(image_sizes, len(pixel_values))

    def _by_image(self, tiles: Tensor, image_sizes: Tensor, numbers: Tensor | None) -> Tensor:
        """The tiles of all images by image. Raises ValueError if images of these sizes have another number of tiles."""
        counts = [1 + math.prod(self.tile_grid(size)) for size in self._sizes(image_sizes, len(image_sizes))]
        if numbers is not None:
            several = [n > 1 for n in numbers.tolist() for _ in range(n)]
            counts = [1 if is_one else n for is_one, n in zip(several, counts, strict=False)]
        if sum(counts) != len(tiles):
            raise ValueError(f"the {len(counts)} images have {sum(counts)} tiles, but pixel_values has {len(tiles)}")
        return pad_sequence(list(tiles.split(counts)), batch_first=True)

    def select(self, rows: Sequence[Sequence[int]], pixel_values: Tensor, **more: Tensor) -> dict[str, Tensor]:
        """The tensors of some images: for each prompt that has images, their numbers."""
        numbers = more.pop("batch_num_images", None)
        if pixel_values.ndim == 4:
            pixel_values = self._by_image(pixel_values, more["image_sizes"], numbers)
        return self.in_prompts(of_images(rows, {"pixel_values": pixel_values, **more}), rows, numbers)

    def in_prompts(
        self, images: dict[str, Tensor], rows: Sequence[Sequence[int]], numbers: Tensor | None
    ) -> dict[str, Tensor]:
        """The tensors of images in these prompts; `numbers` are those of the images of each prompt before."""
        return images

    def _cut(
        self, embed: PatchEmbed, pixels: Tensor, sizes: tuple[Size, ...], tile_grids: tuple[Size, ...]
    ) -> TilePatches:
        """The tiles of all images as patches."""
        of_images = zip(pixels.to(embed.W_E.device), sizes, tile_grids, strict=True)
        cut = embed.patches(torch.cat([self._tiles_of(image, *given) for image, given in enumerate(of_images)]))
        return TilePatches(cut.vectors, cut.grids, sizes=sizes, tile_grids=tile_grids)

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

    def from_images(
        self, embed: PatchEmbed.Config, images: Sequence[Tensor], per_prompt: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """The tiles of normalised images [channel, height, width], as the processor cuts them.

        Images are resized bicubically to their resolution, and padded with 0 on both sides.
        """
        tiles = [self.cut_into_tiles(image) for image in images]
        sizes = torch.tensor([image.shape[-2:] for image in images])
        return self.numbered({"pixel_values": pad_sequence(tiles, batch_first=True), "image_sizes": sizes}, per_prompt)

    def numbered(self, images: dict[str, Tensor], per_prompt: Sequence[int] | None) -> dict[str, Tensor]:
        """The tensors of images of which each prompt has so many; None: it is not known."""
        return images

    def cut_into_tiles(self, image: Tensor) -> Float[Tensor, "tile channel height width"]:
        """The whole image in one tile, then its parts."""
        size, side = (image.shape[-2], image.shape[-1]), self.tile_size
        if not image.numel():
            raise ValueError(f"an image of {size[0]} x {size[1]} pixels is empty")
        resolution, grid = best_resolution(size, self.resolutions), self.tile_grid(size)
        scale = min(resolution[0] / size[0], resolution[1] / size[1])
        fitting = [min(math.ceil(length * scale), most) for length, most in zip(size, resolution, strict=True)]
        below, right = (most - length for length, most in zip(fitting, resolution, strict=True))
        margins = (right // 2, right - right // 2, below // 2, below - below // 2)
        parts = F.pad(resized(image, (fitting[0], fitting[1])), margins).unflatten(2, (grid[1], side))
        parts = parts.unflatten(1, (grid[0], side)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return torch.cat([resized(image, (side, side))[None], parts])

    def size_drawn(self, embed: PatchEmbed.Config, size: Size) -> Size:
        """A size that is padded in its resolution."""
        height, width = max(self.resolutions, key=lambda size: (size[0] != size[1], -size[0] * size[1]))
        return height, max(width - 2 * embed.patch_size, 1)


@dataclass(frozen=True)
class TileImages(TiledImages):
    """`pixel_values` [image, tile, channel, height, width], and `image_sizes` [image, 2]: height and width before resizing.

    The first tile shows the whole image, the others are its parts, row by row, at the best of the `resolutions`. Images with
    fewer tiles than others have empty ones at the end, all zero, which are not run. Or [tile, channel, height, width]: the tiles
    of all images, one after the other.
    """

    arguments: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")

    def patches(
        self,
        embed: PatchEmbed,
        pixel_values: Float[Tensor, "..."] | None = None,
        image_sizes: Int[Tensor, "..."] | None = None,
    ) -> TilePatches:
        """The tiles of all images, one image after the other, as patches. Raises ValueError if tiles and sizes do not fit."""
        pixels, sizes = self._checked(pixel_values, image_sizes)
        return self._cut(embed, pixels, sizes, tuple(self.tile_grid(size) for size in sizes))


@dataclass(frozen=True)
class TileOrWholeImages(TiledImages):
    """As `TileImages`, but each of several images of a prompt has one tile, which shows all of it (LLaVA-OneVision).

    `batch_num_images` [batch] is the number of images of each prompt; without it the tiles that are there say which have others.
    """

    arguments: ClassVar[tuple[str, ...]] = (
        *("pixel_values", "image_sizes", "batch_num_images"),
        *("pixel_values_videos", "image_sizes_videos"),
    )

    def patches(
        self,
        embed: PatchEmbed,
        pixel_values: Float[Tensor, "..."] | None = None,
        image_sizes: Int[Tensor, "..."] | None = None,
        batch_num_images: Int[Tensor, " batch"] | None = None,
        pixel_values_videos: Tensor | None = None,
        image_sizes_videos: Tensor | None = None,
    ) -> TilePatches:
        """The tiles of all images as patches. Raises ValueError for videos, and if tiles, sizes and numbers do not fit."""
        if pixel_values_videos is not None or image_sizes_videos is not None:
            raise ValueError("videos are not supported: give their frames as images, in pixel_values and image_sizes")
        pixels, sizes = self._checked(pixel_values, image_sizes, batch_num_images)
        if batch_num_images is None:
            is_alone = [not bool(tiles[1:].any()) for tiles in pixels]
        else:
            is_alone = [n > 1 for n in batch_num_images.tolist() for _ in range(n)]
        if len(is_alone) != len(sizes):
            raise ValueError(f"batch_num_images counts {len(is_alone)} images, but pixel_values has {len(sizes)}")
        grids = [(0, 0) if alone else self.tile_grid(size) for alone, size in zip(is_alone, sizes, strict=True)]
        return self._cut(embed, pixels, sizes, tuple(grids))

    def in_prompts(
        self, images: dict[str, Tensor], rows: Sequence[Sequence[int]], numbers: Tensor | None
    ) -> dict[str, Tensor]:
        """The images and their numbers in these prompts. Raises ValueError if prompts had other numbers before."""
        if numbers is None:
            return images
        counted = [n for n in numbers.tolist() for _ in range(n)]
        for image, n in ((image, len(row)) for row in rows for image in row):
            if counted[image] != n:
                raise ValueError(
                    f"batch_num_images has {counted[image]} images in the prompt of image {image}, its tokens {n}"
                )
        return {**images, "batch_num_images": torch.tensor([len(row) for row in rows])}

    def numbered(self, images: dict[str, Tensor], per_prompt: Sequence[int] | None) -> dict[str, Tensor]:
        """The images, of which those of a prompt that has several have only the first tile, and their numbers."""
        numbers = [1] * len(images["image_sizes"]) if per_prompt is None else list(per_prompt)
        several = torch.tensor([n > 1 for n in numbers for _ in range(n)])
        images["pixel_values"][several, 1:] = 0
        return {**images, "batch_num_images": torch.tensor(numbers)}


def resized(image: Tensor, size: Size) -> Float[Tensor, "channel height width"]:
    """An image in another size, bicubically."""
    if image.shape[-2:] == size:
        return image
    return F.interpolate(image[None], size, mode="bicubic", antialias=True)[0]


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
    if width / height > columns / rows:  # rounded before it is cut off, as 5.9999999999 means 6
        margin = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(margin, rows - margin), slice(0, columns)
    margin = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(0, rows), slice(margin, columns - margin)
