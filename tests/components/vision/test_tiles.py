"""Images in tiles: the best resolution, where the picture is, tokens of both views, and what does not fit."""

import pytest
import torch
from torch import Tensor

from hooked_lm.components.vision.patch_embed import PatchEmbed
from hooked_lm.components.vision.tiles import TileImages, TileOrWholeImages, TilePatches, best_resolution, picture_in
from hooked_lm.families.vision_languages.llava_next.tile_projector import TileProjector, side_by_side

RESOLUTIONS = ((24, 48), (48, 24), (48, 48), (72, 24), (24, 72))
TILES, WHOLE = TileImages(24, RESOLUTIONS), TileOrWholeImages(24, RESOLUTIONS)


@pytest.fixture(scope="module")
def embed() -> PatchEmbed:
    return PatchEmbed.Config(8, patch_size=6).build()


def sizes(n: int = 400) -> list[tuple[int, int]]:
    drawn = torch.randint(1, 200, (n, 2), generator=torch.Generator().manual_seed(0)).tolist()
    return [(height, width) for height, width in drawn]


def test_the_best_resolution_is_that_of_transformers():
    from transformers.image_processing_utils import select_best_resolution

    for size in sizes():
        assert best_resolution(size, RESOLUTIONS) == select_best_resolution(size, list(RESOLUTIONS))


@pytest.mark.parametrize("grid", [(8, 8), (4, 12), (9, 3), (8, 16)])
def test_the_picture_is_where_transformers_finds_it(grid: tuple[int, int]):
    from transformers.models.llava_next.modeling_llava_next import unpad_image

    cells = torch.arange(grid[0] * grid[1]).view(1, *grid)
    for size in sizes():
        assert torch.equal(cells[0][picture_in(grid, size)], unpad_image(cells, size)[0])


def given(*image_sizes: tuple[int, int], n_tiles: int = 5) -> dict[str, Tensor]:
    pixels = torch.zeros(len(image_sizes), n_tiles, 3, 24, 24)
    for image, size in enumerate(image_sizes):
        rows, columns = TILES.tile_grid(size)
        pixels[image, : 1 + rows * columns] = 1.0
    return {"pixel_values": pixels, "image_sizes": torch.tensor(image_sizes)}


def test_tokens_have_their_cells(embed: PatchEmbed):
    """First those of the whole image, then the rows of the picture with their ends; then padding."""
    patches = TILES.patches(embed, **given((30, 50), (20, 13)))
    assert patches.n_tiles == [5, 3]
    assert len(patches.vectors) == 8
    projector = TileProjector.Config(8, 4).build()
    torch.nn.init.normal_(projector.image_newline)
    features = projector(embed(patches.vectors), patches, 0)
    assert features.n_tokens == [16 + 4 * 9, 16 + 4 * 3]
    picture = [[row, column] for row in range(4) for column in (0, 1, -1)]
    assert features.cells[1].tolist() == [[-1, -1]] * 16 + picture + [[-1, -1]] * 24
    ends = (features.cells[0, 16:, 1] == -1).nonzero().flatten().tolist()
    assert ends == [8, 17, 26, 35]
    assert torch.equal(features.vectors[0, 16:][ends], projector.image_newline.expand(4, -1))


def test_a_token_is_the_patch_that_lies_there():
    """The second tile is right of the first: its upper left patch follows the upper right patch of the first."""
    x = torch.stack([torch.arange(4.0)[:, None].expand(4, 16), torch.arange(16.0).expand(4, 16)], -1)
    picture = side_by_side(x, (4, 4), (2, 2))
    assert picture[0].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert picture[:, 0].tolist() == [[0, 0], [0, 4], [0, 8], [0, 12], [2, 0], [2, 4], [2, 8], [2, 12]]


def test_tiles_may_follow_one_another(embed: PatchEmbed):
    """As transformers reads them too, without empty ones."""
    by_image = given((30, 50), (20, 13))
    flat = {**by_image, "pixel_values": torch.cat([by_image["pixel_values"][0], by_image["pixel_values"][1, :3]])}
    expected, found = (TILES.patches(embed, **images) for images in (by_image, flat))
    assert torch.equal(found.vectors, expected.vectors)
    assert found.tile_grids == expected.tile_grids == ((2, 2), (1, 2))
    chosen = TILES.select([[1]], **flat)
    assert torch.equal(chosen["pixel_values"], by_image["pixel_values"][1:])
    alone, tiled = several(1, (30, 50), (48, 48)), given((20, 13), n_tiles=3)
    in_line = torch.cat([alone["pixel_values"].flatten(0, 1), tiled["pixel_values"][0]])
    sizes, numbers = torch.cat([alone["image_sizes"], tiled["image_sizes"]]), torch.tensor([2, 1])
    whole = WHOLE.patches(embed, in_line, sizes, numbers)
    assert isinstance(whole, TilePatches)
    assert whole.n_tiles == [1, 1, 3]


def several(n_tiles: int, *image_sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Images in one tile each."""
    pixels = torch.zeros(len(image_sizes), n_tiles, 3, 24, 24)
    pixels[:, 0] = 1.0
    return {"pixel_values": pixels, "image_sizes": torch.tensor(image_sizes)}


@pytest.mark.parametrize("told", [True, False])
def test_several_images_of_a_prompt_have_one_tile_each(embed: PatchEmbed, told: bool):
    alone, tiled = several(3, (30, 50), (48, 48)), given((20, 13), n_tiles=3)
    images = {name: torch.cat([alone[name], tiled[name]]) for name in alone}
    numbers = {"batch_num_images": torch.tensor([2, 0, 1])} if told else {}
    patches = WHOLE.patches(embed, **images, **numbers)
    assert patches.n_tiles == [1, 1, 3]
    features = TileProjector.Config(8, 4).build()(embed(patches.vectors), patches, 0)
    assert features.n_tokens == [17, 17, 16 + 4 * 3]
    whole = [[row, column] for row in range(4) for column in range(4)]
    assert features.cells[0].tolist() == whole + [[-1, -1]] * 12


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"batch_num_images": torch.tensor([2])}, "batch_num_images counts 2 images, but pixel_values has 1"),
        ({"batch_num_images": torch.tensor([1])}, "image 0 of 30 x 50 pixels has 5 tiles, one and 2 x 2, .* has 3"),
        (
            {"pixel_values_videos": torch.zeros(1, 2, 3, 24, 24)},
            "videos are not supported: give their frames as images",
        ),
    ],
)
def test_numbers_of_images_and_videos_that_do_not_fit(embed: PatchEmbed, more: dict[str, Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        WHOLE.patches(embed, **several(3, (30, 50)), **more)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image_sizes": torch.tensor([[48, 48]])}, "image 0 of 48 x 48 pixels has 5 tiles, one and 2 x 2, .* has 3"),
        ({"image_sizes": None}, "images need both pixel_values and image_sizes, but there are no image_sizes"),
        ({"image_sizes": torch.tensor([[20, 13]] * 2)}, r"image_sizes must be \[image, 2\] with 1 images, .* \(2, 2\)"),
        ({"image_sizes": torch.tensor([[0, 13]])}, "image 0 is empty: its size is 0 x 13 pixels"),
        ({"pixel_values": torch.ones(0, 3, 3, 24, 24)}, "pixel_values has no images: leave it out for text alone"),
        (
            {"pixel_values": torch.ones(3, 24, 24)},
            r"must be \[image, tile, channel, height, width\] or .*, got \(3, 24, 24\)",
        ),
        ({"pixel_values": torch.ones(4, 3, 24, 24)}, "the 1 images have 3 tiles, but pixel_values has 4"),
        (
            {"pixel_values": torch.ones(1, 4, 3, 24, 24)},
            "image 0 of 20 x 13 pixels has 3 tiles, one and 1 x 2, .* has 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused(embed: PatchEmbed, changed: dict[str, Tensor | None], message: str):
    with pytest.raises(ValueError, match=message):
        TILES.patches(embed, **{**given((20, 13), n_tiles=3), **changed})


@torch.no_grad()
def test_a_thin_image_may_have_no_row(embed: PatchEmbed):
    """What is left of it between the margins is less than a patch: only the whole image has tokens, as in transformers."""
    patches = TILES.patches(embed, **given((1, 300), (20, 13)))
    features = TileProjector.Config(8, 4).build()(embed(patches.vectors), patches, 0)
    assert features.n_tokens == [16, 16 + 4 * 3]


def test_drawn_images_fit(embed: PatchEmbed):
    drawn = TILES.drawn(embed.cfg, (4, 4), 2, torch.Generator().manual_seed(0))
    patches = TILES.patches(embed, **drawn)
    assert isinstance(patches, TilePatches)
    assert len(set(patches.sizes)) == 1
    assert len(patches.n_tiles) == 2
