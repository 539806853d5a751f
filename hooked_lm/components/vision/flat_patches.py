"""Images of any size, given as their patches one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hooked_lm.components.vision.patch_embed import PatchEmbed
from hooked_lm.components.vision.patches import Grid, Patches, cut, of_images
from hooked_lm.components.vision.pixel_format import PixelFormat, Size, check_multiples


@dataclass(frozen=True)
class FlatPatches(PixelFormat):
    """`pixel_values` [patch, d_patch]: the patches of all images, and `image_grid_thw` [image, 3]: frames, rows and columns.

    The patches of an image come in squares of `merge` x `merge`. Videos are refused.
    """

    arguments: ClassVar[tuple[str, ...]] = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    merge: int = 2

    def patches(
        self,
        embed: PatchEmbed,
        pixel_values: Float[Tensor, "..."] | None = None,
        image_grid_thw: Int[Tensor, "..."] | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
    ) -> Patches:
        """The images as patches, row by row. Raises ValueError for videos, and if the grids do not fit."""
        if pixel_values_videos is not None or video_grid_thw is not None:
            raise ValueError(
                "videos are not supported: give their frames as images, in pixel_values and image_grid_thw"
            )
        if pixel_values is None or image_grid_thw is None:
            absent = "pixel_values" if pixel_values is None else "image_grid_thw"
            raise ValueError(f"images need both pixel_values and image_grid_thw, but there is no {absent}")
        d_patch, m = embed.cfg.d_patch, self.merge
        if pixel_values.ndim != 2 or pixel_values.shape[1] != d_patch:
            raise ValueError(f"pixel_values must be [patch, {d_patch}], got {tuple(pixel_values.shape)}")
        sizes = self._sizes(image_grid_thw, len(pixel_values))
        parts = pixel_values.to(embed.W_E.device).split([rows * columns for rows, columns in sizes])
        squares = [
            part.unflatten(0, (rows // m, columns // m, m, m))
            for part, (rows, columns) in zip(parts, sizes, strict=True)
        ]
        in_rows = [square.transpose(1, 2).flatten(0, 3) for square in squares]
        return Patches(pad_sequence(in_rows, batch_first=True), tuple(sizes))

    def _sizes(self, grids: Tensor, n_patches: int) -> list[Grid]:
        """The rows and columns of each image, checked."""
        if grids.ndim != 2 or grids.shape[1] != 3:
            raise ValueError(f"image_grid_thw must be [image, 3], frames, rows and columns, got {tuple(grids.shape)}")
        numbers = [(frames, rows, columns) for frames, rows, columns in grids.tolist()]
        for image, (frames, rows, columns) in enumerate(numbers):
            if frames != 1:
                raise ValueError(f"image {image} has {frames} frames, an image has 1: videos are not supported")
            if rows < 1 or columns < 1 or rows % self.merge or columns % self.merge:
                raise ValueError(
                    f"image {image} has {rows} x {columns} patches, which are not divisible into squares of {self.merge} x "
                    f"{self.merge}"
                )
        sizes = [(rows, columns) for _, rows, columns in numbers]
        if (total := sum(rows * columns for rows, columns in sizes)) != n_patches:
            raise ValueError(f"image_grid_thw describes {total} patches, but pixel_values has {n_patches}")
        return sizes

    def select(
        self,
        rows: Sequence[Sequence[int]],
        pixel_values: Float[Tensor, "patch d_patch"],
        image_grid_thw: Int[Tensor, "image 3"],
    ) -> dict[str, Tensor]:
        """The tensors of some images: for each prompt that has images, their numbers."""
        parts = pixel_values.split(image_grid_thw.prod(1).tolist())
        chosen = torch.cat([parts[image] for row in rows for image in row])
        return {"pixel_values": chosen, **of_images(rows, {"image_grid_thw": image_grid_thw})}

    def from_images(
        self, embed: PatchEmbed.Config, images: Sequence[Tensor], per_prompt: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        check_multiples(images, embed.patch_size * self.merge)
        vectors, grids, m = [], [], self.merge
        for image in images:
            patches = cut(image[None], embed.patch_size)
            rows, columns = patches.grids[0]
            of_frame = patches.vectors[0].unflatten(1, (embed.n_channels, 1, -1)).expand(-1, -1, embed.n_frames, -1)
            squares = of_frame.flatten(1).unflatten(0, (rows // m, m, columns // m, m))
            vectors.append(squares.transpose(1, 2).flatten(0, 3))
            grids.append([1, rows, columns])
        return {"pixel_values": torch.cat(vectors), "image_grid_thw": torch.tensor(grids)}

    def size_drawn(self, embed: PatchEmbed.Config, size: Size) -> Size:
        side = embed.patch_size * self.merge
        return -(-size[0] // side) * side, -(-size[1] // side) * side
