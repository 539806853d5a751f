"""Plain images as the tensors of each format: those that it reads, and those that it refuses."""

import pytest
import torch

from hooked_lm.components.vision.flat_patches import FlatPatches
from hooked_lm.components.vision.patch_embed import PatchEmbed
from hooked_lm.components.vision.pixel_format import PixelFormat
from hooked_lm.components.vision.pixels import ImageRows, MaskedImages, PixelImages, SizedImages
from hooked_lm.components.vision.tiles import TileImages

EMBED = PatchEmbed.Config(8, 4, n_frames=1)
WIDE, TALL = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0)), torch.ones(3, 16, 8)


@pytest.mark.parametrize("pixels", [FlatPatches(), MaskedImages(), ImageRows(), SizedImages(2)])
def test_images_of_different_sizes_have_the_patches_that_they_have_alone(pixels: PixelFormat):
    embed = EMBED.build()
    both = pixels.patches(embed, **pixels.from_images(EMBED, [WIDE, TALL]))
    for number, image in enumerate((WIDE, TALL)):
        alone = PixelImages().patches(embed, image[None])
        assert torch.equal(both.vectors[number][both.seen[number]], alone.vectors[0])


@pytest.mark.parametrize(
    ("shown", "n_kept"),
    [(None, 2), ([[1, 0], [1, 0]], 2), ([[1, 0], [0, 0]], 1), ([[1, 1], [0, 0]], 2)],
)
def test_black_images_stay_in_each_row(shown: list[list[int]] | None, n_kept: int):
    """Rows may be copies; what the mask shows are no images that fill up a row."""
    images = torch.zeros(2, 2, 3, 8, 8)
    mask = None if shown is None else torch.tensor(shown)[..., None, None].expand(2, 2, 8, 8)
    assert len(ImageRows(keeps_one=True).patches(EMBED.build(), images, mask).vectors) == n_kept


@pytest.mark.parametrize(
    ("pixels", "image", "message"),
    [
        (FlatPatches(), torch.ones(3, 8, 12), "image 1 has 8 x 12 pixels: height and width must be multiples of 8"),
        (SizedImages(), torch.ones(3, 9, 12), "image 1 has 9 x 12 pixels: height and width must be multiples of 4"),
        (ImageRows(), torch.ones(3, 0, 8), "image 1 has 0 x 8 pixels"),
        (ImageRows(), torch.zeros(3, 8, 8), "all pixels of image 1 are 0, which means to this model"),
        (PixelImages(), TALL, r"images of different sizes, \[\(3, 8, 16\), \(3, 16, 8\)\]: .* resize them"),
        (TileImages(8, ((8, 16),)), torch.ones(3, 0, 8), "an image of 0 x 8 pixels is empty"),
    ],
)
def test_images_that_do_not_fit_are_refused(pixels: PixelFormat, image: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        pixels.from_images(EMBED, [WIDE, image])
