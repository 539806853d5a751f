"""Some of the prompts of a batch, with their images. That the logits stay the same is tested for every family."""

import pytest
import torch

from hooked_lm import VisionInputs
from hooked_lm.components.vision.tiles import TileOrWholeImages
from hooked_lm.engine.prompts import some_rows
from tests.families._vision import hooked_vlm, written
from tests.families.vision_languages import CASES

CASE = next(case for case in CASES if case.name == "last-but-one")
MODEL, IMAGE = hooked_vlm(CASE), CASE.writer.sizes[0]


def test_each_row_has_its_images_and_marks():
    inputs = written(CASE, [[2, IMAGE, 3, IMAGE, 1], [4], [IMAGE, 1]])
    mask, pixels = inputs["attention_mask"], inputs["pixel_values"]
    rows = VisionInputs(inputs["input_ids"], {"pixel_values": pixels}, mask, is_image=inputs["input_ids"] == 58)
    found = some_rows(MODEL, rows, [2, 0, 2])
    assert isinstance(found, VisionInputs)
    assert torch.equal(found.images["pixel_values"], pixels[[2, 0, 1, 2]])
    for name in ("tokens", "attention_mask", "is_image"):
        assert torch.equal(getattr(found, name), getattr(rows, name)[[2, 0, 2]])
    assert some_rows(MODEL, rows, slice(1, 2)).images == {}
    assert torch.equal(some_rows(MODEL, rows.tokens, slice(1, None)), rows.tokens[1:])


def test_an_image_in_two_prompts_is_refused():
    tokens = torch.full((2, 24), 58)
    with pytest.raises(ValueError, match="image 1 has tokens in two prompts, 0 and 1"):
        MODEL.rows(VisionInputs(tokens, {"pixel_values": torch.zeros(3, 3, 24, 24)}), [0])


def test_rows_are_indices_or_a_slice():
    rows = VisionInputs(torch.tensor([[1, 2], [3, 4]]))
    for which, expected in ((0, [[1, 2]]), (slice(0, 1), [[1, 2]]), (-1, [[3, 4]]), (torch.tensor([1]), [[3, 4]])):
        assert MODEL.rows(rows, which).tokens.tolist() == expected
    with pytest.raises(TypeError, match=r"for a mask pass mask.nonzero\(\)"):
        MODEL.rows(rows, torch.tensor([False, True]))
    with pytest.raises(IndexError, match="rows 2 is out of range: there are 2"):
        MODEL.rows(rows, 2)
    with pytest.raises(TypeError, match="rows are of token ids"):
        MODEL.rows(VisionInputs("text"), 0)


def test_numbers_of_images_go_with_the_rows():
    pixels, given = TileOrWholeImages(24, ((24, 48),)), torch.arange(4)
    found = pixels.select([[3], [1, 2]], pixel_values=given, batch_num_images=torch.tensor([1, 2, 1]))
    assert found["pixel_values"].tolist() == [3, 1, 2]
    assert found["batch_num_images"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="2 images in the prompt of image 0, its tokens 1"):
        pixels.select([[0]], pixel_values=given, batch_num_images=torch.tensor([2, 2]))
