"""The bundled vision-language model and the pictures that it was trained on."""

import random

import pytest
import torch
from PIL import Image

from hooked_lm import HookedVisionLanguage, VisionInputs
from hooked_lm.demo import shapes
from hooked_lm.demo.shapes import Question
from tests.close import assert_near

N_TOKENS = (shapes.SIZE // shapes.PATCH) ** 2


@pytest.fixture(scope="module")
def model() -> HookedVisionLanguage:
    return HookedVisionLanguage.from_pretrained_no_processing("demo-shapes")


def asked(model: HookedVisionLanguage, questions: list[Question]) -> VisionInputs:
    """The prompts of questions of one length, with their pictures."""
    image = " ".join([shapes.IMAGE] * N_TOKENS)
    texts = [f"<s> {question.text}".replace(shapes.IMAGE, image) for question in questions]
    ids = torch.tensor([model.tokenizer.encode(text, add_special_tokens=False) for text in texts])
    return VisionInputs(ids, {"pixel_values": torch.stack([shapes.pixels(each.picture) for each in questions])})


@torch.no_grad()
def test_held_out_pictures_are_understood(model: HookedVisionLanguage) -> None:
    rng = random.Random(7)
    questions = [shapes.random_question(rng, held_out=True) for _ in range(120)]
    for asks_colour in (True, False):
        some = [question for question in questions if question.asks_colour == asks_colour]
        logits = model(asked(model, some))[:, -1]
        answers = model.tokenizer.convert_tokens_to_ids([question.answer for question in some])
        assert (logits.argmax(-1) == torch.tensor(answers)).float().mean() > 0.97


def test_sites_of_the_bundled_model_mean_what_they_say(model: HookedVisionLanguage) -> None:
    assert model.verify().ok


def test_pictures_are_the_same_on_every_machine() -> None:
    """But for the place of shapes, which is drawn."""
    picture = shapes.random_picture(random.Random(3), held_out=True)
    assert picture.is_held_out
    assert torch.equal(shapes.pixels(picture), shapes.pixels(picture))
    assert shapes.pixels(picture).abs().max() <= 1


def test_a_picture_of_ones_own_is_read_as_the_pixels_it_was_drawn_from(model, tmp_path):
    drawn, text = shapes.random_picture(random.Random(3)), "<image> which shape is in the lower right ?"
    pixels = shapes.pixels(drawn)
    picture = Image.fromarray((127.5 * (pixels + 1)).round().byte().permute(1, 2, 0).numpy())
    picture.save(tmp_path / "shapes.png")
    ready = model.prepare(text, pixels[None])
    for given in (picture, tmp_path / "shapes.png", str(tmp_path / "shapes.png")):
        read = model.prepare(text, given)
        assert torch.equal(read.tokens, ready.tokens)
        assert_near(read.images["pixel_values"], pixels[None], 0.005, because="a picture has 256 levels of a colour")
    larger = model.prepare(text, picture.resize((300, 200)))
    assert model(larger)[0, -1].argmax() == model(ready)[0, -1].argmax()
    with pytest.raises(FileNotFoundError, match=r"no such file; it should hold a picture"):
        model.prepare(text, tmp_path / "no.png")
