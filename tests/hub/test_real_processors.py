"""Real processors of transformers on pillow: prompts with pictures, as the model of transformers reads them."""

import json
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.smolvlm import processing_smolvlm

from hooked_lm import HookedVisionLanguage
from tests.close import assert_close
from tests.core import IMAGES, thinned
from tests.families._vision import answer, hooked_any
from tests.families._vision import theirs as theirs_of
from tests.families.dual_encoders import CASES as pairs
from tests.families.vision_encoders import CASES as towers
from tests.hub.processors import REALS, SHORT, SQUARE, Real, save, tokenizer

# of numpy's new version, in the processor of PaliGemma
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
PIXTRAL = next(real for real in REALS if real.family == "mistral3")
BUILT = {real.family: real for real in REALS if real is not PIXTRAL}


def picture(height: int, width: int) -> Image.Image:
    drawn = np.random.default_rng(height).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(drawn)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a family, and the model of transformers."""

    @lru_cache
    def saved(family: str) -> tuple[Path, Any]:
        path = tmp_path_factory.mktemp(family)
        return path, save(BUILT[family], path)

    return saved


@pytest.fixture(params=thinned(BUILT, IMAGES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> HookedVisionLanguage:
    if family == "smolvlm":  # which spells the lengths of videos with it
        monkeypatch.setattr(processing_smolvlm, "num2words", object())
    return HookedVisionLanguage.from_pretrained_no_processing(folders(family)[0])


@pytest.fixture
def theirs(family: str, folders: Any) -> Any:
    return folders(family)[1]


def their_logits(model: Any, given: Any) -> Tensor:
    """What transformers says of the output of a processor."""
    names = {name: x for name, x in given.items() if name != "labels"}
    with torch.no_grad():
        return model(**names).logits


def check_close(ours: Tensor, theirs: Tensor, mask: Tensor) -> None:
    seen = mask.bool()
    assert ours.shape == theirs.shape
    assert (ours - theirs)[seen].abs().max() <= 1e-4 * theirs.abs().max()


@torch.no_grad()
def test_the_output_of_a_processor_is_read(family: str, model: Any, theirs: Any):
    made, real = model.processor, BUILT[family]
    assert type(made).__name__ == real.processor
    text = [f"what {made.image_token} is {made.image_token} ?", f"{made.image_token} this"]
    pictures = [[picture(30, 50), picture(40, 20)], [picture(24, 24)]]
    given = made(text=text, images=pictures, return_tensors="pt", padding=True)
    check_close(model(**given), their_logits(theirs, given), given["attention_mask"])


def prompts_of(real: Real) -> dict[str, tuple[list[str], list[Any]]]:
    """Prompts with two images, with one, and without, as arrays and pictures of different sizes; "<image>" where they are."""
    a, b = picture(30, 50), np.asarray(picture(40, 20))
    found = {
        "two and one": (
            ["what <image> is <image> ?", "<image> this"],
            [a, b, torch.from_numpy(b.copy()).permute(2, 0, 1)],
        ),
        "one": (["a <image>"], [a]),
    }
    if real.family == "paligemma":  # whose processor puts BOS into the midst of a prompt without an image
        return found
    return {**found, "none": (["what is this ?", "that"], []), "none beside one": (["no", "a <image> b"], [b])}


@torch.no_grad()
def test_prompts_are_written_by_the_processor(family: str, model: Any, theirs: Any):
    real, made = BUILT[family], model.processor
    for texts, pictures in prompts_of(real).values():
        inputs = model.prepare(texts, pictures)
        written = [text.replace("<image>", real.place.strip()) for text in texts]
        left = iter(pictures)
        nested = [[next(left) for _ in range(text.count("<image>"))] for text in texts]
        images = {"images": nested} if pictures else {}
        given = made(text=written, **images, return_tensors="pt", padding=True)
        assert inputs.tokens.tolist() == given["input_ids"].tolist()
        assert inputs.attention_mask.tolist() == given["attention_mask"].tolist()
        for name, x in inputs.images.items():
            assert torch.equal(x, given[name])
        check_close(model(inputs), their_logits(theirs, given), inputs.attention_mask)


# whose processors write an image in several pieces, or a token between the texts
UNCERTAIN = ("paligemma", "idefics3", "smolvlm", "internvl")


@pytest.mark.filterwarnings("ignore:the tokenizer has no token for")  # its vocabulary is small
def test_chats_are_written_by_the_template(family: str, model: Any):
    """As the processor writes them in one call."""
    made = model.processor
    words = ["a b"] if family == "paligemma" else ["a ", " b"]
    parts = [{"type": "text", "text": word} for word in words]
    chat = [{"role": "user", "content": [parts[0], {"type": "image", "image": picture(30, 50)}, *parts[1:]]}]
    inputs = model.prepare(chat)
    given = made.apply_chat_template(
        [chat], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    assert inputs.tokens.tolist() == given["input_ids"].tolist()
    assert all(torch.equal(x, given[name]) for name, x in inputs.images.items())
    if family in UNCERTAIN:
        with pytest.raises(ValueError, match=r"it is not certain whose they are; model\.prepare\(messages\) reads it"):
            model.chat(chat, add_generation_prompt=True)
        return
    labelled = model.chat(chat, add_generation_prompt=True)
    assert labelled.tokens.tolist() == inputs.tokens.tolist()
    is_image = model.images_among(labelled.tokens)
    assert bool(labelled.mask("image")[is_image].all())
    assert labelled.of({"part": "content"}).replace(" ", "") == "ab"
    assert {label.turn for label in labelled.labels[0] if label.part in ("image", "content")} == {0}


# of the processor, so that one image is one, of its own size
WHOLE: dict[str, dict[str, Any]] = {
    "idefics3": {"do_image_splitting": False, "size": {"longest_edge": 24}},
    "smolvlm": {"do_image_splitting": False, "size": {"longest_edge": 24}},
    "internvl": {"crop_to_patches": False},
}
TILED = ("llava_next", "llava_onevision")


@torch.no_grad()
def test_pixels_without_a_processor_are_written_as_by_it(family: str, model: Any):
    """The ids of prompts, and the tensors of images that need no resizing."""
    made = model.processor.image_processor
    side = 24 - 24 % (getattr(made, "patch_size", 1) * getattr(made, "merge_size", 1))
    drawn = picture(48, 24) if family in TILED else picture(side, side)
    texts = ["a <image> b", "<image>"]
    expected = model.prepare(texts, [drawn, drawn], **WHOLE.get(family, {}))
    mean, std = (torch.tensor(x)[:, None, None] for x in (made.image_mean, made.image_std))
    normalised = (torch.from_numpy(np.array(drawn)).permute(2, 0, 1) / 255 - mean) / std
    model.processor = None
    found = model.prepare(texts, torch.stack([normalised, normalised]))
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.attention_mask.tolist() == expected.attention_mask.tolist()
    for name, x in found.images.items():
        theirs = expected.images[name].view_as(x).to(x.dtype)
        if name == "pixel_values" and family in TILED:
            assert (x[:, 0] - theirs[:, 0]).abs().mean() < 0.1  # the whole image in one tile, which is resized
            x, theirs = x[:, 1:], theirs[:, 1:]
        assert_close(x, theirs)


@pytest.mark.slow
def test_bos_and_options_of_a_processor(folders: Any):
    """One BOS, or none, though the tokenizer of LLaVA writes it."""
    model = HookedVisionLanguage.from_pretrained_no_processing(folders("llava")[0])
    for text in ("a<image>", "[BOS]a<image>"):
        for prepend_bos, start in ((True, [1, 3]), (False, [3])):
            assert model.prepare(text, [picture(24, 24)], prepend_bos=prepend_bos).tokens.tolist() == [
                start + [58] * 16
            ]
    message = {"role": "user", "content": "a"}
    assert model.prepare(message).tokens.tolist() == [[1, 3, 29, 28]]
    assert model.prepare(message, prepend_bos=False).tokens.tolist() == [[3, 29, 28]]
    with pytest.raises(TypeError, match="prepare has no argument 'do_resiz'; did you mean 'do_resize'"):
        model.prepare("<image>", [picture(24, 24)], do_resiz=False)
    large = torch.zeros(1, 3, 36, 36)
    model = HookedVisionLanguage.from_pretrained_no_processing(folders("gemma3")[0])
    with pytest.raises(ValueError, match="an image of 6 x 6 patches does not fit: this tower has positions for 4 x 4"):
        model.prepare("<image>", large)  # whose projector needs the whole grid
    model = HookedVisionLanguage.from_pretrained_no_processing(folders("paligemma")[0])
    with pytest.raises(TypeError, match="writes BOS itself, after the images"):
        model.prepare("<image>", [picture(24, 24)], prepend_bos=True)


def test_a_processor_that_needs_torchvision_for_pictures_too(tmp_path: Path):
    """That of Pixtral; without it, images of different sizes are written row by row."""
    save(PIXTRAL, tmp_path)
    model = HookedVisionLanguage.from_pretrained_no_processing(tmp_path)
    if find_spec("torchvision") is None:
        with pytest.raises(ValueError, match="cannot be made: PixtralProcessor requires the Torchvision library"):
            model.prepare("<image>", [picture(24, 24)])
    model.processor = None
    images = [torch.randn(3, 24, 36), torch.randn(3, 36, 12)]
    found = model.prepare(["a<image>", "[IMG]b"], images)
    i, line, end = 58, 44, 45
    wide, narrow = [i, i, i, line, i, i, i, end], [i, line, i, line, i, end]
    assert found.tokens.tolist() == [[3, *wide], [0, 0, *narrow, 4]]
    assert found.images["image_sizes"].tolist() == [[24, 36], [36, 12]]
    for n, (image, text) in enumerate(zip(images, ("a<image>", "[IMG]b"), strict=True)):
        alone = model(model.prepare(text, [image]))[0]
        assert_close(model(found)[n, -len(alone) :], alone)


TEXTS = {"padding": "max_length", "max_length": 12, "return_tensors": "pt"}


@pytest.mark.parametrize("family", ["clip", "siglip"])
@torch.no_grad()
def test_dual_encoders_read_what_their_processors_make(family: str):
    case = next(case for case in pairs if case.family == family)
    images, whole = {
        "clip": ("CLIPImageProcessorPil", "CLIPProcessor"),
        "siglip": ("SiglipImageProcessorPil", "SiglipProcessor"),
    }[family]
    sizes = SHORT if family == "clip" else {"size": SQUARE}
    words = tokenizer(BUILT["llava"])
    words.padding_side = "right"
    made = getattr(transformers, whole)(getattr(transformers, images)(**sizes), words)
    given = made(text=["ab z", "what"], images=[picture(30, 50), picture(24, 24), picture(40, 20)], **TEXTS)
    found, expected = hooked_any(case)(**given), theirs_of(case)(**given).logits_per_image
    assert found.shape == (3, 2)
    assert_close(found, expected)


@torch.no_grad()
def test_towers_read_what_their_processors_make():
    case = next(case for case in towers if case.family == "vit")
    given = transformers.ViTImageProcessorPil(size=SQUARE)([picture(30, 50), picture(24, 24)], return_tensors="pt")
    assert_close(hooked_any(case)(**given), answer(theirs_of(case)(**given)))


WITHOUT_PILLOW = """
import sys
sys.modules["PIL"] = sys.modules["torchvision"] = None  # to import them is an error
import torch
from hooked_lm import HookedVisionLanguage
tower = dict(n_layers=1, d_model=16, n_heads=2, image_size=8, patch_size=4, act_fn="gelu")
cfg = dict(n_layers=1, d_model=16, n_heads=2, n_ctx=16, d_vocab=10, act_fn="gelu", vision=tower, image_token=9)
model = HookedVisionLanguage(cfg)
inputs = model.prepare(torch.tensor([1, 9, 2]), torch.zeros(1, 3, 8, 8))
print(tuple(model.run_with_cache(inputs)[0].shape), model.generate(inputs, 2, stop_at_eos=False, verbose=False).shape[1])
"""


@pytest.mark.slow
def test_nothing_needs_pillow():
    done = subprocess.run([sys.executable, "-c", WITHOUT_PILLOW], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(1, 6, 10) 8", done.stderr


def test_a_processor_may_be_described_with_its_images_alone(tmp_path: Path):
    """As in older checkpoints, which have no other file of it."""
    save(BUILT["qwen2_vl"], tmp_path)
    described = json.loads((tmp_path / "processor_config.json").read_text())
    (tmp_path / "processor_config.json").unlink()
    images = {**described["image_processor"], "processor_class": described["processor_class"]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    model = HookedVisionLanguage.from_pretrained_no_processing(tmp_path)
    assert type(model.processor).__name__ == "Qwen2VLProcessor"
    assert model.prepare("<image>", [picture(24, 24)]).tokens.tolist() == [[41, *[58] * 9, 42]]
