"""Idefics3 and SmolVLM beyond what all vision families buy: padding around pictures, oblong images, empty images."""

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedTransformer
from hooked_lm.components.vision.patch_embed import BucketPosEmbed
from hooked_lm.components.vision.patches import cut
from tests.close import assert_close
from tests.families._case import Case
from tests.families._vision import VisionCase, hooked_tower, hooked_vlm, logits_of, reference, theirs, written
from tests.families.vision_idefics import CASES, TOWERS
from tests.unchecked import unchecked

FIRST = {case.family: case for case in reversed(CASES)}
IDEFICS3, SMOLVLM = FIRST["idefics3"], FIRST["smolvlm"]


def pictures(rows: int, columns: int, *sizes: tuple[int, int]) -> Tensor:
    """Masks [image, row, column] of pictures of these sizes in images of one size."""
    masks = torch.zeros(len(sizes), rows, columns, dtype=torch.bool)
    for mask, (height, width) in zip(masks, sizes, strict=True):
        mask[:height, :width] = True
    return masks


def random_images(case: Case, n_images: int, height: int, width: int) -> Tensor:
    size = (n_images, hooked_tower(case).cfg.n_channels, height, width)
    return torch.randn(size, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("tower", TOWERS, ids=str)
@torch.no_grad()
def test_towers_with_pictures_of_many_sizes(tower: Case):
    patch = tower.fields["patch_size"]
    pixels = random_images(tower, 4, 7 * patch + 1, 9 * patch)
    mask = pictures(7, 9, (7, 9), (1, 1), (3, 9), (6, 5))
    expected = theirs(tower)(pixels, patch_attention_mask=mask).last_hidden_state
    assert_close(hooked_tower(tower)(pixels, patch_attention_mask=mask), expected)
    _, cache = hooked_tower(tower).run_with_cache(pixels, patch_attention_mask=mask)
    pattern = cache["pattern", 0].sum((1, 2)).unflatten(1, (7, 9))
    assert torch.equal(pattern > 0, mask), "every patch attends to those of the picture, and to no others"


def test_an_image_of_the_size_of_the_grid_has_each_vector_once():
    embed = BucketPosEmbed.Config(8, 3).build()
    nn.init.normal_(embed.W_pos)
    assert torch.equal(embed(cut(torch.zeros(1, 1, 8, 8), 1))[0], embed.W_pos)


@torch.no_grad()
def test_tokens_of_oblong_images_are_those_of_their_squares():
    """`Idefics3Connector.pixel_shuffle` of transformers takes the root of the number of patches for the height and the width of
    any image: in one of 2 x 8 patches it would join patches that are far apart."""
    model, other = hooked_vlm(IDEFICS3), theirs(IDEFICS3)
    pixels = torch.randn(1, 1, 3, 12, 48, generator=torch.Generator().manual_seed(5))
    features = model.image_features({"pixel_values": pixels})
    hidden = other.model.vision_model(pixels[0]).last_hidden_state[0].unflatten(0, (2, 8))
    squares = torch.stack([hidden[:, i : i + 2].flatten() for i in range(0, 8, 2)])
    assert_close(features.vectors[0], other.model.connector.modality_projection(squares))
    assert features.cells[0].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]


@torch.no_grad()
def test_empty_images_are_dropped():
    """SmolVLM keeps the first image if all are empty."""
    inputs = written(IDEFICS3, [[2, (1, 1), 3], [2, (1, 1), 3]])
    apart = torch.zeros(2, 3, *inputs["pixel_values"].shape[2:])
    apart[0, 1], apart[1, 2] = inputs["pixel_values"][:, 0]
    spread = {**inputs, "pixel_values": apart}
    assert_close(hooked_vlm(IDEFICS3)(**spread), logits_of(IDEFICS3, inputs))
    one = {**{name: x[:1] for name, x in inputs.items()}, "pixel_values": torch.zeros(1, 2, 3, 24, 24)}
    assert_close(hooked_vlm(SMOLVLM)(**one), logits_of(SMOLVLM, one))
    text = {**one, "input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    words = {
        name: x for name, x in text.items() if name != "pixel_values"
    }  # transformers fails on images that are all empty
    assert_close(hooked_vlm(IDEFICS3)(**text), logits_of(IDEFICS3, words))
    with pytest.raises(ValueError, match=r"the prompts have 4 image tokens .* the 0 images have 0"):
        hooked_vlm(IDEFICS3)(**one)


@unchecked()
def test_what_does_not_fit_is_refused():
    tower, model = hooked_tower(TOWERS[0]), hooked_vlm(IDEFICS3)
    pixels, mask = random_images(TOWERS[0], 2, 24, 24), pictures(4, 4, (2, 3), (4, 4))
    hole = mask.clone()
    hole[1, 2, 2] = False
    for wrong in (hole, mask.flip(2), mask & False):
        with pytest.raises(ValueError, match=r"the mask of image \d is no rectangle in the upper left"):
            tower(pixels, patch_attention_mask=wrong)
    with pytest.raises(ValueError, match=r"must be \[image, row, column\], here \(2, 4, 4\), got \(2, 3, 4\)"):
        tower(pixels, patch_attention_mask=mask[:, 1:])
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match=r"must be \[batch, image, channel, height, width\], got \(2, 3, 24, 24\)"):
        model(ids, pixel_values=pixels)
    with pytest.raises(ValueError, match=r"here \(1, 2, 24, 24\), got \(2, 24, 24\)"):
        model(ids, pixel_values=pixels[None], pixel_attention_mask=torch.ones(2, 24, 24))
    with pytest.raises(ValueError, match="an image of 3 x 4 patches cannot be cut into squares of 2 x 2"):
        model(ids, pixel_values=pixels[None, :, :, :18])


@pytest.mark.parametrize("case", [IDEFICS3, SMOLVLM], ids=str)
@torch.no_grad()
def test_the_language_model_alone(case: VisionCase):
    tokens = torch.tensor([[5, 6, 7, 8]])
    model = HookedTransformer.from_pretrained_no_processing("tiny", hf_model=reference(case))
    assert_close(model(tokens), theirs(case)(tokens).logits)
