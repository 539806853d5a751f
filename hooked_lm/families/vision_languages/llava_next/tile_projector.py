"""The projector of images that were cut into tiles: it puts them together again."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hooked_lm.components.vision.image_context import ImageFeatures
from hooked_lm.components.vision.patches import Patches
from hooked_lm.components.vision.pixel_format import Size
from hooked_lm.components.vision.projector import MLPProjector
from hooked_lm.components.vision.tiles import TilePatches, picture_in

Picture = Float[Tensor, "row column d_model"]
LARGEST_EXCESS = 1.1  # of the side of a picture over that of its largest size


class TileProjector(MLPProjector):
    """An `MLPProjector` of each tile. An image has the tokens of the tile that shows all of it, then those of its other tiles
    together, row by row across tiles, without padding around the picture and with `image_newline` [d_model] after each row.

    All sites are per tile; the images are put together after `hook_out`. Tokens have their row and column in the picture, the
    end of a row has column -1, and tokens of the tile that shows all of the image have -1 for both.
    """

    axes = {"image_newline": "d_model"}

    @dataclass(frozen=True)
    class Config(MLPProjector.Config):
        """A picture of more patches than `max_tiles` tiles have is shrunk to about so many, bilinearly."""

        max_tiles: int | None = None

        def build(self) -> "TileProjector":
            return TileProjector(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.image_newline = nn.Parameter(torch.empty(cfg.d_model))

    def of_images(self, tiles: ImageFeatures, patches: Patches) -> ImageFeatures:
        assert isinstance(patches, TilePatches), "the patches of tiles"
        grid, whole = patches.grids[0], tiles.cells[0]
        vectors, cells = [], []
        of_images = zip(tiles.vectors.split(patches.n_tiles), patches.sizes, patches.tile_grids, strict=True)
        for of_image, size, tile_grid in of_images:
            if tile_grid == (0, 0):
                vectors.append(torch.cat([of_image[0], self.image_newline[None].to(of_image.dtype)]))
                cells.append(F.pad(whole, (0, 0, 0, 1), value=-1))
                continue
            together = side_by_side(of_image[1:], grid, tile_grid)
            picture = self.in_rows(together[picture_in((together.shape[0], together.shape[1]), size)], grid)
            vectors.append(torch.cat([of_image[0], picture.flatten(0, 1)]))
            cells.append(torch.cat([torch.full_like(whole, -1), cells_in_rows(picture, whole.device)]))
        return ImageFeatures(
            pad_sequence(vectors, batch_first=True),
            pad_sequence(cells, batch_first=True, padding_value=-1),
            tuple(map(len, cells)),
        )

    def in_rows(self, picture: Picture, grid: Size) -> Float[Tensor, "rows all_columns d_model"]:
        """A picture with the ends of rows as a last column, shrunk if it is too large; `grid` is that of a tile's patches."""
        rows, columns = picture.shape[:2]
        excess = 0.0 if self.cfg.max_tiles is None else math.sqrt(rows * columns / (self.cfg.max_tiles * grid[0] ** 2))
        if excess > LARGEST_EXCESS:
            size = (int(rows // excess), int(columns // excess))
            picture = F.interpolate(picture.permute(2, 0, 1)[None], size, mode="bilinear")[0].permute(1, 2, 0)
        return torch.cat([picture, self.image_newline.to(picture.dtype).expand(len(picture), 1, -1)], 1)


def side_by_side(tiles: Float[Tensor, "tile patch d_model"], grid: Size, tile_grid: Size) -> Picture:
    """Tiles of a grid, each of which has patches in a grid, as one grid of patches."""
    return tiles.unflatten(1, grid).unflatten(0, tile_grid).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def cells_in_rows(picture: Picture, device: torch.device) -> Int[Tensor, "token 2"]:
    """The row and column of each vector of a picture whose last column, -1, are the ends of rows."""
    rows, columns = picture.shape[:2]
    of_row = F.pad(torch.arange(columns - 1, device=device), (0, 1), value=-1)
    return torch.cartesian_prod(torch.arange(rows, device=device), of_row)
