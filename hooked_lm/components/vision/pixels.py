"""How the pixels of images are given: under the names, and in the shapes, of the processors of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hooked_lm.components.vision.patch_embed import PatchEmbed
from hooked_lm.components.vision.patches import Patches, of_images
from hooked_lm.components.vision.pixel_format import ImageByImage, PixelFormat, Size, check_multiples, padded_images


@dataclass(frozen=True)
class PixelImages(ImageByImage):
    """`pixel_values` [image, channel, height, width]: images of one size."""

    arguments: ClassVar[tuple[str, ...]] = ("pixel_values",)

    def patches(self, embed: PatchEmbed, pixel_values: Float[Tensor, "image channel height width"]) -> Patches:
        """The images as patches. Raises ValueError without images, and for images that patches do not fill."""
        if not len(pixel_values):
            raise ValueError(f"there are no images: pixel_values are {tuple(pixel_values.shape)}")
        patches = embed.patches(pixel_values.to(embed.W_E.device))
        embed.check_filled(pixel_values)
        return patches

    def from_images(
        self, embed: PatchEmbed.Config, images: Sequence[Tensor], per_prompt: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        sizes = sorted({tuple(image.shape) for image in images})
        if len(sizes) > 1:
            raise ValueError(f"images of different sizes, {sizes}: this model reads images of one size; resize them")
        return {"pixel_values": torch.stack(list(images))}


@dataclass(frozen=True)
class MaskedImages(ImageByImage):
    """`pixel_values` [image, channel, height, width], each a picture in the upper left of its image and padding around it.

    `patch_attention_mask` [image, row, column] is True for the patches of the picture; without it all are.
    """

    arguments: ClassVar[tuple[str, ...]] = ("pixel_values", "patch_attention_mask")

    def patches(
        self,
        embed: PatchEmbed,
        pixel_values: Float[Tensor, "image channel height width"],
        patch_attention_mask: Tensor | None = None,
    ) -> Patches:
        """The images as patches, hidden where there is no picture. Raises ValueError for a mask that does not fit."""
        patches = embed.patches(pixel_values.to(embed.W_E.device))
        if patch_attention_mask is None:
            return patches
        size = tuple(length // embed.cfg.patch_size for length in pixel_values.shape[2:])
        seen = patch_attention_mask.to(patches.vectors.device, torch.bool)
        if seen.shape != (len(pixel_values), *size):
            raise ValueError(
                f"patch_attention_mask must be [image, row, column], here {(len(pixel_values), *size)}, got {tuple(seen.shape)}"
            )
        rows, columns = (torch.arange(length, device=seen.device) for length in size)
        is_row, is_column = rows < seen[:, :, :1].sum(1), columns < seen[:, :1].sum(2)
        is_picture = is_row[:, :, None] & is_column[:, None]
        for image in ((seen != is_picture) | ~seen[:, :1, :1]).flatten(1).any(1).nonzero()[:1].flatten().tolist():
            raise ValueError(
                f"the mask of image {image} is no rectangle in the upper left, in which patches have their places"
            )
        return patches if seen.all() else replace(patches, hidden=~seen.flatten(1))

    def from_images(
        self, embed: PatchEmbed.Config, images: Sequence[Tensor], per_prompt: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        check_multiples(images, embed.patch_size)
        pixels, sizes = padded_images(images)
        n = sizes // embed.patch_size
        rows, columns = (torch.arange(length) for length in n.amax(0).tolist())
        mask = (rows[:, None] < n[:, 0, None, None]) & (columns < n[:, 1, None, None])
        return {"pixel_values": pixels} if mask.all() else {"pixel_values": pixels, "patch_attention_mask": mask}


@dataclass(frozen=True)
class ImageRows(PixelFormat):
    """`pixel_values` [batch, image, channel, height, width]: the images of each row, and empty ones, all zero, to fill it up.

    Empty images are dropped. With `keeps_one`, if all are empty, those stay that the mask shows; without a mask the first of
    each row, of which the rows may be copies. `pixel_attention_mask` [batch, image, height,
    width] is True for the pixels of a picture in the upper left of an image; without it all are.
    """

    keeps_one: bool = False
    arguments: ClassVar[tuple[str, ...]] = ("pixel_values", "pixel_attention_mask")

    def patches(
        self, embed: PatchEmbed, pixel_values: Float[Tensor, "..."], pixel_attention_mask: Tensor | None = None
    ) -> Patches:
        """The images that are not empty as patches, row after row. Raises ValueError for another shape, or a mask that does not
        fit."""
        if pixel_values.ndim != 5:
            raise ValueError(
                f"pixel_values must be [batch, image, channel, height, width], got {tuple(pixel_values.shape)}"
            )
        images, kept = pixel_values.flatten(0, 1), self._kept(pixel_values, pixel_attention_mask)
        if pixel_attention_mask is None:
            return MaskedImages().patches(embed, images[kept])
        height, width = pixel_values.shape[3:]
        if pixel_attention_mask.shape != (*pixel_values.shape[:2], height, width):
            raise ValueError(
                "pixel_attention_mask must be [batch, image, height, width], here "
                f"{(*pixel_values.shape[:2], height, width)}, got {tuple(pixel_attention_mask.shape)}"
            )
        of_pixels = pixel_attention_mask.flatten(0, 1)[kept.to(pixel_attention_mask.device)].bool()
        of_patches = F.max_pool2d(of_pixels[:, None].float(), embed.cfg.patch_size)[:, 0] > 0
        return MaskedImages().patches(embed, images[kept], of_patches)

    def _kept(
        self, pixel_values: Float[Tensor, "batch image channel height width"], mask: Tensor | None
    ) -> Bool[Tensor, " all_images"]:
        """Which images are not dropped."""
        kept = (pixel_values != 0).flatten(2).any(2)
        if self.keeps_one and not kept.any():
            kept[:, 0] = True
            if mask is not None and mask.any():
                kept = mask.flatten(2).any(2).to(kept.device)
        return kept.flatten()

    def select(
        self, rows: Sequence[Sequence[int]], pixel_values: Float[Tensor, "..."], **more: Tensor
    ) -> dict[str, Tensor]:
        """The tensors of some images, without empty ones: for each prompt that has images, their numbers."""
        kept = self._kept(pixel_values, more.get("pixel_attention_mask"))
        in_order = {
            name: x.flatten(0, 1)[kept.to(x.device)] for name, x in {"pixel_values": pixel_values, **more}.items()
        }
        return {name: x[:, None] for name, x in of_images(rows, in_order).items()}

    def from_images(
        self, embed: PatchEmbed.Config, images: Sequence[Tensor], per_prompt: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        found = MaskedImages().from_images(embed, images)
        for i, image in enumerate(images):
            if not image.any():
                raise ValueError(f"all pixels of image {i} are 0, which means to this model that there is no image")
        given = {"pixel_values": found["pixel_values"][:, None]}
        if (of_patches := found.get("patch_attention_mask")) is not None:
            size = embed.patch_size
            given["pixel_attention_mask"] = of_patches.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, None]
        return given


@dataclass(frozen=True)
class SizedImages(ImageByImage):
    """`pixel_values` [image, channel, height, width] with padding below and at the right, and `image_sizes` [image, 2].

    The sizes are height and width in pixels; the padding is not run. Without sizes there is none. Random images have whole
    squares of `merge` x `merge` patches.
    """

    merge: int = 1
    arguments: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")

    def patches(
        self,
        embed: PatchEmbed,
        pixel_values: Float[Tensor, "image channel height width"],
        image_sizes: Tensor | None = None,
    ) -> Patches:
        """The images as patches. Raises ValueError for sizes that do not fit."""
        whole = embed.patches(pixel_values.to(embed.W_E.device))
        if image_sizes is None:
            return whole
        if image_sizes.shape != (len(pixel_values), 2):
            raise ValueError(
                f"image_sizes must be [image, 2], here {(len(pixel_values), 2)}, got {tuple(image_sizes.shape)}"
            )
        height, width = pixel_values.shape[2:]
        side = embed.cfg.patch_size
        sizes: list[list[int]] = image_sizes.tolist()
        for image, size in enumerate(sizes):
            if not (side <= size[0] <= height and side <= size[1] <= width):
                raise ValueError(
                    f"image {image} has a size of {size[0]} x {size[1]} pixels: it must be between one patch "
                    f"({side}) and {height} x {width}, the size of pixel_values"
                )
        grids = tuple((size[0] // side, size[1] // side) for size in sizes)
        in_rows = whole.vectors.unflatten(1, (height // side, width // side))
        kept = [image[:rows, :columns].flatten(0, 1) for image, (rows, columns) in zip(in_rows, grids, strict=True)]
        return Patches(pad_sequence(kept, batch_first=True), grids)

    def from_images(
        self, embed: PatchEmbed.Config, images: Sequence[Tensor], per_prompt: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        check_multiples(images, embed.patch_size * self.merge)
        pixels, sizes = padded_images(images)
        return {"pixel_values": pixels, "image_sizes": sizes}

    def size_drawn(self, embed: PatchEmbed.Config, size: Size) -> Size:
        side = embed.patch_size * self.merge
        return -(-size[0] // side) * side, -(-size[1] // side) * side
