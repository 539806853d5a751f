"""The bundled vision-language model and the pictures that it was trained on."""

import random

import pytest
import torch

from hooked_lm import HookedVisionLanguage, VisionInputs
from hooked_lm.demo import shapes
from hooked_lm.demo.shapes import Question

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
