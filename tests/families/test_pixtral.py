"""Pixtral's tower and Mistral Small 3.1 beyond what all vision families buy."""

import json
from pathlib import Path

import pytest
import torch

from hooked_lm import HookedVisionLanguage
from tests.close import assert_close
from tests.families._vision import hooked_tower, hooked_vlm, logits_of, reference, scenes, theirs, written
from tests.families.vision_pixtral import CASES, MINISTRAL, TOWERS
from tests.unchecked import unchecked

CASE = CASES[0]


@torch.no_grad()
def test_padding_around_images_is_not_run():
    """The images that transformers joins into one row are apart, with padding at the end of the smaller one."""
    pixels = torch.randn(2, 3, 20, 32, generator=torch.Generator().manual_seed(5))
    sizes = torch.tensor([[19, 30], [12, 8]])
    expected = theirs(TOWERS[0])(pixels, image_sizes=sizes).last_hidden_state[0].split([15, 2])
    found = hooked_tower(TOWERS[0])(pixels, image_sizes=sizes)
    assert found.shape[:2] == (2, 15)
    assert_close(found[0], expected[0])
    assert_close(found[1, :2], expected[1])


@torch.no_grad()
def test_an_image_of_one_token():
    """`Mistral3Model.get_image_features` of transformers fails on it: it drops the axis of tokens."""
    model, other = hooked_vlm(CASE), theirs(CASE).model
    pixels, sizes = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(5)), torch.tensor([[12, 12]])
    hidden = other.vision_tower(pixels, image_sizes=sizes).last_hidden_state[0]
    expected = other.multi_modal_projector(hidden, sizes)
    assert_close(model.image_features({"pixel_values": pixels, "image_sizes": sizes}).vectors[0], expected)


@torch.no_grad()
def test_a_head_in_the_file_that_differs_is_not_tied(tmp_path: Path):
    """Configs of published files say nothing of ties, and the default of transformers is a tie."""
    reference(CASE).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, inputs = HookedVisionLanguage.from_pretrained_no_processing(tmp_path), written(CASE, [[3, (4, 2), 2]])
    assert_close(model(**inputs), logits_of(CASE, inputs))


@torch.no_grad()
def test_ministral_reads_images():
    inputs = written(MINISTRAL, scenes(MINISTRAL)["two"])
    assert_close(hooked_vlm(MINISTRAL)(**inputs), logits_of(MINISTRAL, inputs))


@unchecked()
def test_what_does_not_fit_is_refused():
    tower, pixels = hooked_tower(TOWERS[0]), torch.zeros(2, 3, 20, 30)
    for wrong in ([30, 20], [5, 30], [20, -6]):
        with pytest.raises(
            ValueError, match=rf"image 1 has a size of {wrong[0]} x {wrong[1]} pixels: it must be between"
        ):
            tower(pixels, image_sizes=torch.tensor([[20, 30], wrong]))
    with pytest.raises(ValueError, match=r"image_sizes must be \[image, 2\], here \(2, 2\), got \(1, 2\)"):
        tower(pixels, image_sizes=torch.tensor([[20, 30]]))
    with pytest.raises(ValueError, match="an image of 3 x 5 patches cannot be cut into squares of 2 x 2"):
        hooked_vlm(CASE)(torch.tensor([[5, 6]]), pixel_values=pixels)
