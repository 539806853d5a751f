"""What `prepare` and the towers are given: prompts, images and pixels that they read, and those that they refuse."""

from typing import Any

import numpy as np
import pytest
import torch

from hooked_lm import HookedVisionEncoder, HookedVisionLanguage, VisionInputs
from tests.families._vision import hooked_any
from tests.families.dual_encoders import CASES as PAIRS
from tests.models.vision.test_toy import IMAGE, TOWER, Processor, pixels, tokenizer, toy
from tests.unchecked import unchecked

A, B = pixels(2)
INTEGERS = torch.zeros(3, 8, 8, dtype=torch.uint8)
CHAT = [{"role": "user", "content": [{"type": "image", "image": A}, {"type": "text", "text": "what"}]}]


@pytest.fixture(scope="module")
def model() -> HookedVisionLanguage:
    made = toy()
    made.set_tokenizer(tokenizer())
    return made


class PilPicture:
    """What a picture of pillow is known by."""

    def convert(self, mode: str) -> Any:
        return np.zeros((8, 8, 3), dtype=np.uint8)


def test_images_may_be_given_by_prompt(model: HookedVisionLanguage):
    texts = ["what <image> is <image>", "red", "<image>"]
    C = pixels(3)[2]
    flat = model.prepare(texts, [A, B, C])
    for nested in ([[A, B], [], [C]], [[A, B], None, C], [torch.stack([A, B]), [], C[None]], [[[A], B], [], (C,)]):
        found = model.prepare(texts, nested)
        assert torch.equal(found.tokens, flat.tokens)
        assert torch.equal(found.images["pixel_values"], flat.images["pixel_values"])
    written = model.prepare(flat.tokens, [[A, B], [], [C]])  # as many tokens as the images have
    assert torch.equal(written.tokens, flat.tokens)


@pytest.mark.parametrize(
    ("prompts", "images", "error", "words"),
    [
        # nested otherwise than the places
        (["what <image>", "is <image>"], [[A, B], []], ValueError, "prompt 0 has 1 place for images, but 2 images"),
        (["<image> <image>", "<image>"], [[A], [A, B]], ValueError, "prompt 0 has 2 places for images, but 1 image"),
        (["<image>", "<image>"], [[A, B]], ValueError, "images are nested, 1 group for 2 prompts"),
        (torch.full((2, 4), IMAGE), [[A, B], []], ValueError, "prompt 0 has 4 image tokens, but its 2 images need 8"),
        # prompts
        (["<image> what", 5], [A], TypeError, "prompt 1: got int 5; a prompt is text, token ids, or"),
        (5, None, TypeError, "prompts: got int 5; prompts are texts"),
        ([], None, ValueError, "there are no prompts"),
        (["", "what"], None, ValueError, "prompt 0 becomes zero tokens"),
        (torch.tensor([1.0]), None, TypeError, r"got torch.float32 \[1\]; token ids are integers"),
        ([[1], [3.5]], None, TypeError, r"prompt 1: got list \[3.5\]"),
        ([["what", A], [2]], None, TypeError, "in parts and token ids cannot be mixed"),
        (VisionInputs(torch.tensor([[1]])), None, TypeError, "VisionInputs, which are ready"),
        ({"input_ids": torch.tensor([[1]])}, None, TypeError, r"model\(\*\*inputs\)"),
        (
            "what " * 41,
            None,
            ValueError,
            "have 41 tokens with their images, more than the model's n_ctx of 40; .* n_ctx=",
        ),
        # chats
        ({"role": "user", "content": "what"}, None, ValueError, "chat messages need the checkpoint's processor"),
        ([{"role": "user"}], None, TypeError, "a message of a chat is a dict with 'role' and 'content'"),
        ([{"role": "user", "content": ["what"]}], None, TypeError, "a list of dicts with 'type'"),
        ([CHAT, "what"], None, TypeError, "chat 1: got str 'what'; a chat is a list of messages"),
        (CHAT, [A], ValueError, "among its messages: leave images out"),
        # images
        ("<image>", 5, TypeError, "image 0: got int 5; an image is a picture"),
        (["what", A, 5], None, TypeError, "image 1: got int 5"),
        ("<image>", "a.png", ValueError, "pictures are read by the checkpoint's processor"),
        (
            "<image> <image>",
            [PilPicture(), A],
            TypeError,
            "image 1 torch.float32 .* give only pictures, or only pixels",
        ),
        ("<image>", A * float("nan"), ValueError, "192 of 192 pixel values of image 0 are NaN or infinite"),
        ("<image>", np.full((3, 8, 8), np.inf), ValueError, "192 of 192 pixel values of image 0 are NaN or infinite"),
        (
            "<image>",
            np.zeros((8, 8, 3)),
            ValueError,
            r"got \(8, 8, 3\); a picture \[height, width, channel\] is of integers",
        ),
        (
            "<image>",
            {"pixel_values": INTEGERS},
            TypeError,
            r"pixel_values: got torch.uint8 \[3, 8, 8\]; .* floating-point",
        ),
        ("<image>", {"pixels": A}, TypeError, "this model reads no 'pixels': images are pixel_values"),
        ("<image>", torch.zeros(3, 12, 8), ValueError, r"positions for 2 x 2; resize it$"),
    ],
)
def test_what_is_refused(model: HookedVisionLanguage, prompts: Any, images: Any, error: type[Exception], words: str):
    with unchecked(), pytest.raises(error, match=words):
        model.prepare(prompts, images)


def test_other_arguments_are_refused(model: HookedVisionLanguage):
    with pytest.raises(ValueError, match="padding_side must be 'left' or 'right', got 'up'"):
        model.prepare("what", padding_side="up")
    with pytest.raises(TypeError, match="prepend_bos is for text"):
        model.prepare([1, 2], prepend_bos=True)


def test_floating_point_arrays_are_ready(model: HookedVisionLanguage):
    """With a processor too, which would scale them once more."""
    made = toy()
    made.set_tokenizer(model.tokenizer)
    made.processor = Processor()
    for images in (A.numpy(), A.numpy()[None], [A.numpy()]):
        assert torch.equal(made.prepare("<image>", images).images["pixel_values"], A[None])
    assert made.processor.asked == {}
    with pytest.raises(TypeError, match="do_rescale: arguments of the processor, which these inputs do not need"):
        made.prepare("<image>", A, do_rescale=False)


def test_a_message_is_a_chat_of_one(model: HookedVisionLanguage):
    """Its text reaches a template that reads lists only, too."""
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"
    made = toy()
    made.set_tokenizer(words)
    message = {"role": "user", "content": "what is"}
    for prompts in (message, [message], [[message]]):
        assert made.prepare(prompts).tokens.tolist() == [[2, 3]]
    assert made.prepare([message], prepend_bos=True).tokens.tolist() == [[1, 2, 3]]
    words.chat_template = "what"
    with pytest.raises(ValueError, match="the chat template leaves out the message 'what is'"):
        made.prepare(message)


def test_pixels_that_are_ready_for_encoders():
    tower = HookedVisionEncoder({**TOWER, "seed": 0})
    pair = hooked_any(next(case for case in PAIRS if case.family == "clip"))
    side = pair.tree.vision.grid[0] * pair.tree.vision.embed.patch_size
    big = torch.randn(3, side, side, generator=torch.Generator().manual_seed(0))
    with unchecked(), torch.no_grad():
        for run, image in ((tower, A), (pair.encode_image, big)):
            expected = run(image[None])
            for given in (image, [image], image.numpy(), [image.numpy()]):
                assert torch.equal(run(given), expected)
            for given in (PilPicture(), "a.png", image.byte(), (255 * image.numpy()).astype("uint8"), [image.int()]):
                with pytest.raises(TypeError, match="pixels that are ready are floating-point tensors or arrays"):
                    run(given)
            with pytest.raises(ValueError, match="there are no images"):
                run([])
            with pytest.raises(ValueError, match="resize it, or call the model with interpolate_pos_encoding=True"):
                run(torch.cat([image, image], 1))


def test_integers_are_no_pixels_of_a_run(model: HookedVisionLanguage):
    ids, images = torch.tensor([[1, *[IMAGE] * 4]]), INTEGERS[None]
    with unchecked():
        for run in (
            lambda: model(input_ids=ids, pixel_values=images),
            lambda: model(VisionInputs(ids, {"pixel_values": images})),
            lambda: model.image_features({"pixel_values": images}),
        ):
            with pytest.raises(TypeError, match=r"got torch.uint8 \[.*\]; pixels that are ready are floating-point"):
                run()
