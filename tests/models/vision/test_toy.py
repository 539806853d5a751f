"""Vision-language models built from flat names: the model, its places of images, and prompts written without a processor."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hooked_lm import HookedVisionLanguage, VisionInputs
from hooked_lm.models.config.flat_vision import HookedVisionLanguageConfig

TOWER = {"n_layers": 2, "d_model": 16, "n_heads": 2, "image_size": 8, "patch_size": 4, "act_fn": "gelu"}
SIZES = {"n_layers": 2, "d_model": 24, "n_heads": 2, "n_ctx": 40, "d_vocab": 12, "act_fn": "gelu"}
IMAGE = 9
CFG: dict[str, Any] = {**SIZES, "vision": TOWER, "image_token": IMAGE, "default_prepend_bos": False}
WORDS = ["[PAD]", "[BOS]", "what", "is", "in", "the", "picture", "and", "?", "<image>", "red"]


def toy(**fields: Any) -> HookedVisionLanguage:
    return HookedVisionLanguage({**CFG, "seed": 1, **fields})


def tokenizer(knows_images: bool = True) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"additional_special_tokens": ["<image>"]} if knows_images else {}
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", bos_token="[BOS]", **special)


def pixels(n: int) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(n))


# ---- the config ------------------------------------------------------------------------------------------------------


def test_a_model_is_built_from_flat_names():
    model = toy()
    assert model.verify().ok
    assert (model.vision.embed.cfg.d_model, model.projector.cfg.d_model) == (16, 24)
    inputs = {"pixel_values": pixels(1)}
    logits, cache = model.run_with_cache(torch.tensor([[1, *[IMAGE] * 4, 2]]), **inputs)
    assert logits.shape == (1, 6, 12)
    assert cache["vision.blocks.1.attn.hook_pattern"].shape == (1, 2, 5, 5)
    logits.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "W_cls" not in name)


def test_flat_names_take_effect_on_both_sides():
    cfg = HookedVisionLanguageConfig(**CFG)
    assert replace(cfg, d_model=32).tree.projector.d_model == 32
    assert replace(cfg, vision={**TOWER, "d_model": 8}).tree.projector.d_vision == 8
    assert replace(cfg, image_token=3).tree.image_token == 3
    again = HookedVisionLanguageConfig.from_dict(cfg.to_dict())
    assert again.tree == cfg.tree


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"vision": None}, ValueError, "vision is missing"),
        ({"image_token": -1}, ValueError, "image_token is missing"),
        ({"image_token": 12}, ValueError, "image_token=12 is no token: the ids of d_vocab=12 end before it"),
        ({"vision": {**TOWER, "image_size": 9}}, ValueError, "image_size=9 is no multiple of patch_size=4"),
        ({"vision": {**TOWER, "seed": 3}}, ValueError, "a tower inside of a model has no seed of its own"),
        ({"vision": {**TOWER, "n_classes": 3}}, ValueError, "no n_classes of its own"),
        ({"vision": {**TOWER, "d_modell": 3}}, TypeError, "d_modell"),
    ],
)
def test_configs_without_a_model(fields: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        toy(**fields)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_text_with_images():
    """Each image is where its placeholder is; shorter rows are padded on the left."""
    model = toy()
    model.set_tokenizer(tokenizer())
    inputs = model.prepare(["what is in <image> and <image> ?", "what is red ?"], pixels(2))
    i = [IMAGE] * 4
    assert inputs.tokens.tolist() == [[2, 3, 4, *i, 7, *i, 8], [0] * 9 + [2, 3, 10, 8]]
    assert inputs.attention_mask.tolist() == [[1] * 13, [0] * 9 + [1] * 4]
    right = model.prepare("what <image>", [pixels(1)[0]], prepend_bos=True, padding_side="right")
    assert right.tokens.tolist() == [[1, 2, *i]]
    with torch.no_grad():
        assert model(inputs).shape == (2, 13, 12)
        assert model.generate(inputs, 3, stop_at_eos=False, verbose=False).shape == (2, 16)


def test_a_tokenizer_need_not_know_the_token_of_images():
    model = toy(image_token=11)
    model.set_tokenizer(tokenizer(knows_images=False))
    assert model.prepare("what <image> ?", pixels(1)).tokens.tolist() == [[2, *[11] * 4, 8]]


def test_parts_ids_and_tensors_say_the_same():
    model = toy()
    model.set_tokenizer(tokenizer())
    image = pixels(2)
    expected = model.prepare("what <image> and <image> ?", image)
    ready = {"pixel_values": image}
    for prompts, images in (
        (["what ", image[0], " and ", image[1], " ?"], None),
        ([["what ", image[0], " and ", image[1], " ?"]], None),
        (torch.tensor([2, 9, 7, 9, 8]), image),
        ([2, 9, 7, 9, 8], ready),
        ([[2, 9, 7, 9, 8]], [[image[0], image[1]]]),
        (expected.tokens, image),
    ):
        found = model.prepare(prompts, images)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.images["pixel_values"], image)


def test_chats_follow_the_template_of_the_tokenizer():
    model, words = toy(), tokenizer()
    model.set_tokenizer(words)
    part = {"type": "image", "image": pixels(1)[0]}
    chat = [{"role": "user", "content": [{"type": "text", "text": "what is"}, part, {"type": "text", "text": "?"}]}]
    with pytest.raises(ValueError, match="a chat template, and this model has none"):
        model.prepare(chat)
    words.chat_template = (
        "{% for m in messages %}{% for c in m['content'] %}"
        "{{ '<image>' if c['type'] == 'image' else c['text'] }} {% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}and{% endif %}"
    )
    found = model.prepare(chat)
    assert found.tokens.tolist() == [[2, 3, *[IMAGE] * 4, 8, 7]]
    assert torch.equal(found.images["pixel_values"], pixels(1))


class Processor:
    """Writes prompts as a processor of transformers does, and notes what it was asked."""

    chat_template = "of a processor"

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def __call__(self, text: list[str], images: Any = None, **options: Any) -> dict[str, Tensor]:
        self.asked = {"text": text, "images": images, **options}
        ids = torch.tensor([[2, *[IMAGE] * 4, 8]] * len(text))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels(len(text))}

    def apply_chat_template(self, chat: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return f"{len(chat)} messages <image>"


def test_a_processor_reads_pictures():
    model = toy()
    model.processor = Processor()
    picture = torch.zeros(3, 20, 30, dtype=torch.uint8)
    found = model.prepare("what <image> ?", [picture], do_rescale=False)
    assert isinstance(found, VisionInputs)
    assert found.tokens.shape == (1, 6)
    assert set(found.images) == {"pixel_values"}
    asked = {"return_tensors": "pt", "padding": True, "padding_side": "left", "do_rescale": False}
    assert model.processor.asked == {"text": ["what <image> ?"], "images": [[picture]], **asked}
    chat = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]}]
    model.prepare(chat)
    assert model.processor.asked["text"] == ["1 messages <image>"]
    assert model.processor.asked["images"] == [[picture]]


def test_what_cannot_be_prepared():
    model, picture = toy(), torch.zeros(3, 20, 30, dtype=torch.uint8)
    model.set_tokenizer(tokenizer())
    with pytest.raises(ValueError, match="the prompts have 1 place for images, but there are 2 images"):
        model.prepare("what <image>", pixels(2))
    with pytest.raises(ValueError, match="the prompts have 2 places for images, but there are 0 images"):
        model.prepare("what <image> <image>")
    with pytest.raises(ValueError, match="processor, and this model has none; give pixels that are ready"):
        model.prepare("what <image>", [picture])
    model.why_no_processor = "it needs pillow, which is not installed"
    with pytest.raises(ValueError, match="it needs pillow, which is not installed"):
        model.prepare("what <image>", [picture])
    with pytest.raises(ValueError, match="leave images out"):
        model.prepare(["what", pixels(1)[0]], pixels(1))
    with pytest.raises(ValueError, match="images of different sizes"):
        model.prepare("<image> <image>", [torch.zeros(3, 8, 8), torch.zeros(3, 8, 4)])
    with pytest.raises(TypeError, match="do_rescale: arguments of a processor"):
        model.prepare("<image>", pixels(1), do_rescale=False)


# ---- places ----------------------------------------------------------------------------------------------------------


def test_places_of_images():
    model = toy()
    ids = torch.tensor([[1, *[IMAGE] * 4, 2, *[IMAGE] * 4], [*[IMAGE] * 4, 3, 4, 5, 6, 7, 8]])
    inputs = VisionInputs(ids, {"pixel_values": pixels(3)})
    places, grids = model.image_positions(inputs), model.patch_grid(inputs)
    assert [grid.tolist() for grid in grids] == [[[1, 2], [3, 4]], [[6, 7], [8, 9]], [[0, 1], [2, 3]]]
    assert places.cell(8) == (1, 1, 0)
    assert places.cell(-1) == (1, 1, 1)
    assert places.cell(3, prompt=1) == (2, 1, 1)
    assert places.position(2, 1, 0) == (1, 2)
    with pytest.raises(ValueError, match="position 5 of prompt 0 is no image token; its image tokens are at 1-4, 6-9"):
        places.cell(5)
    with pytest.raises(ValueError, match="image 1 has 2 x 2 tokens, and none at row 2, column 0"):
        places.position(1, 2, 0)
    with pytest.raises(IndexError, match="position 100 is out of range: each prompt has 10, so -10 to 9"):
        places.cell(100)
    with pytest.raises(IndexError, match="image 3 is out of range: the batch has 3"):
        places.position(3, 0, 0)
    text = model.image_positions(torch.tensor([[1, 2]]))
    assert text.n_images == 0
    with pytest.raises(ValueError, match="position 1 of prompt 0 is no image token; it has none"):
        text.cell(1)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_images_that_do_not_fit():
    model, ids = toy(), torch.tensor([[1, *[IMAGE] * 4, 2]])
    broken = pixels(2)
    broken[1, 0, 5, :3] = float("nan")
    both = torch.cat([ids, ids])
    for given, images, words in (
        (both, broken, "3 of 192 pixel values of image 1 are NaN or infinite"),
        (ids, torch.zeros(0, 3, 8, 8), "there are no images"),
        (ids, torch.zeros(1, 1, 8, 8), r"with 3 channels, got \(1, 1, 8, 8\)"),
        (ids, torch.zeros(1, 3, 12, 8), "an image of 3 x 2 patches does not fit: this tower has positions for 2 x 2"),
        (ids, torch.zeros(1, 3, 2, 8), "an image of 2 x 8 pixels is smaller than a patch of 4 x 4"),
        (ids, None, r"the prompts have 4 image tokens \(id 9\), but there are no images"),
        (torch.tensor([[1, 2]]), pixels(1), "the prompts have 0 image tokens .* the 1 images have 4"),
    ):
        with pytest.raises(ValueError, match=words):
            model(given, pixel_values=images)
    assert model(torch.tensor([[1, 2]]), pixel_values=None).shape == (1, 2, 12)
