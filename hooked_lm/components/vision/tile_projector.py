"""The projector of images that were cut into tiles: it puts them together again."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hooked_lm.components.vision.image_features import ImageFeatures
from hooked_lm.components.vision.patches import Patches
from hooked_lm.components.vision.projector import MLPProjector, Stream
from hooked_lm.components.vision.tiles import Size, TilePatches, picture_in


class TileProjector(MLPProjector):
    """An `MLPProjector` of each tile. An image has the tokens of the tile that shows all of it, then those of its other tiles
    together, row by row across tiles, without padding around the picture and with `image_newline` [d_model] after each row.

    All sites are per tile; the images are put together after `hook_out`. Tokens have their row and column in the picture, the
    end of a row has column -1, and tokens of the tile that shows all of the image have -1 for both.
    """

    @dataclass(frozen=True)
    class Config(MLPProjector.Config):
        def build(self) -> "TileProjector":
            return TileProjector(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.image_newline = nn.Parameter(torch.empty(cfg.d_model))

    def forward(self, x: Stream, patches: Patches, n_class_tokens: int) -> ImageFeatures:
        assert isinstance(patches, TilePatches), "the patches of tiles"
        tiles = super().forward(x, patches, n_class_tokens)
        of_images = zip(tiles.vectors.split(patches.n_tiles), patches.sizes, patches.tile_grids, strict=True)
        grid = (int(patches.grid[0, 0]), int(patches.grid[0, 1]))
        vectors = [
            torch.cat([of_image[0], self.in_rows(of_image[1:], grid, size, tile_grid)])
            for of_image, size, tile_grid in of_images
        ]
        of_whole = torch.full_like(tiles.cells[0], -1)
        cells = [
            torch.cat([of_whole, cells_in_rows(grid, size, tile_grid).to(of_whole)])
            for size, tile_grid in zip(patches.sizes, patches.tile_grids, strict=True)
        ]
        longest = max(map(len, cells))
        real = [torch.arange(longest, device=of_whole.device) < len(of_image) for of_image in cells]
        return ImageFeatures(
            pad_sequence(vectors, batch_first=True),
            pad_sequence(cells, batch_first=True, padding_value=-1),
            torch.stack(real),
        )

    def in_rows(
        self, tiles: Float[Tensor, "tile patch d_model"], grid: Size, size: Size, tile_grid: Size
    ) -> Float[Tensor, "token d_model"]:
        """The tokens of an image of this size, whose tiles have this grid of patches each, with the ends of rows."""
        together = tiles.unflatten(1, grid).unflatten(0, tile_grid).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        picture = together[picture_in((tile_grid[0] * grid[0], tile_grid[1] * grid[1]), size)]
        newlines = self.image_newline.to(picture.dtype).expand(len(picture), 1, -1)
        return torch.cat([picture, newlines], 1).flatten(0, 1)


def cells_in_rows(grid: Size, size: Size, tile_grid: Size) -> Int[Tensor, "token 2"]:
    """The row and column of each token of an image in its picture; column -1 is the end of a row."""
    rows, columns = picture_in((tile_grid[0] * grid[0], tile_grid[1] * grid[1]), size)
    n_rows, n_columns = rows.stop - rows.start, columns.stop - columns.start
    of_row = F.pad(torch.arange(n_columns), (0, 1), value=-1)
    return torch.cartesian_prod(torch.arange(n_rows), of_row)
