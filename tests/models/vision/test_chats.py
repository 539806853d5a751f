"""Conversations with images: the tokens of an image are its message's, or it is refused that they can be told."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedVisionLanguage, analysis, at, patching
from hooked_lm.hooks.token_labels import PADDING
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import joined
from tests.close import assert_apart, assert_close
from tests.models.vision.test_toy import IMAGE, pixels, tokenizer, toy

GREEDY: dict[str, Any] = {"do_sample": False, "verbose": False, "return_type": "tokens", "stop_at_eos": False}
TEMPLATE = (
    "[BOS] {% for m in messages %}{{ 'in' if m.role == 'user' else 'the' }} {% if m.content is string %}{{ m.content }} "
    "{% else %}{% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }} {% endfor %}{% endif %}and "
    "{% endfor %}{% if add_generation_prompt %}the{% endif %}"
)
LISTS = "{% for m in messages %}{% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }} {% endfor %}{% endfor %}"
IMAGES_FIRST = (
    "{% for m in messages %}{% for c in m.content if c.type == 'image' %}<image> {% endfor %}{% endfor %}"
    "{% for m in messages %}{% for c in m.content if c.type == 'text' %}{{ c.text }} {% endfor %}{% endfor %}"
)
WITHOUT = "{% for m in messages %}{% for c in m.content if c.type == 'text' %}{{ c.text }} {% endfor %}{% endfor %}"


@cache
def model() -> HookedVisionLanguage:
    made = toy(n_ctx=60)
    words = tokenizer()
    words.chat_template = TEMPLATE
    made.set_tokenizer(words)
    return made


def image(number: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": pixels(4)[number]}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def asked(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


ONE = [
    asked(text("what is"), image(), text("?")),
    {"role": "assistant", "content": "red"},
    asked(text("what is red ?")),
]
TWO = [asked(image(1), text("is"), image(2)), {"role": "assistant", "content": "red"}, asked(text("what"), image(3))]


def labels(chat: Chat, row: int = 0) -> list[tuple[int, str]]:
    return [(label.turn, label.part) for label in chat.labels[row]]


def test_the_tokens_of_an_image_are_its_message_s():
    chat = model().chat(ONE)
    expected = [
        (-1, "marker"), (-1, "marker"), (0, "content"), (0, "content"), *[(0, "image")] * 4, (0, "content"), (-1, "marker"),
        (-1, "marker"), (1, "content"), (-1, "marker"), (-1, "marker"), *[(2, "content")] * 4, (-1, "marker"),
    ]  # fmt: skip
    assert labels(chat) == expected
    assert (chat.tokens[0] == IMAGE).nonzero().flatten().tolist() == chat.positions("image")
    assert chat.positions({"turn": 0, "role": "user", "part": "image"}) == chat.positions("image")
    assert chat.of("first_user").split() == ["what", "is", "<image>" * 4, "?"]


def test_the_tokens_are_those_that_prepare_writes():
    for messages in (ONE, TWO):
        chat, inputs = model().chat(messages, add_generation_prompt=True), model().prepare(messages)
        assert torch.equal(chat.tokens, inputs.tokens)
        assert torch.equal(model()(chat), model()(inputs))
        assert_apart(model()(chat), model()(inputs.tokens, pixel_values=inputs.images["pixel_values"] + 1))


def test_a_batch_equals_its_conversations_one_by_one():
    batch = model().chat([ONE, TWO])
    assert PADDING in (batch.labels[0] + batch.labels[1])
    logits = model()(batch)
    for row, messages in enumerate((ONE, TWO)):
        one, real = model().chat(messages), batch.attention_mask[row].bool()
        assert [label for label in batch.labels[row] if label != PADDING] == list(one.labels[0])
        assert_close(logits[row, real], model()(one)[0])
    assert len(batch.positions("image", 1)) == 12
    assert batch.mask("image").equal(batch.tokens == IMAGE)


def test_positions_of_images_are_those_of_hooks_caches_and_sweeps():
    chat = model().chat(ONE, add_generation_prompt=True)
    plain, where = model()(chat), chat.positions("image")
    named, numbered = (
        model().run_with_hooks(chat, fwd_hooks=[at("resid_pre", 1, positions=some).zero()]) for some in ("image", where)
    )
    assert torch.equal(named, numbered)
    assert_apart(named, plain)
    _, cache = model().run_with_cache(chat)
    assert torch.equal(cache.select(part="image")["resid_post", 1], cache["resid_post", 1][:, where])
    assert_close(cache.mean_by("part")["resid_post", 1][:, 2], cache["resid_post", 1][:, where].mean(1))
    other = model().chat([asked(text("what is"), image(1), text("?")), *ONE[1:]], add_generation_prompt=True)
    swept = patching.sweep(model(), other, chat, answers=(5, 6), positions="image", layers=[0], progress=False)
    by_number = patching.sweep(
        model(), other.inputs, chat.inputs, answers=(5, 6), positions=where, layers=[0], progress=False
    )
    assert torch.equal(swept.values, by_number.values)
    assert swept.mean_by("part").axes["part"] == ("image",)
    assert swept.about["turns"][2] == [4, 8, 0, "user", "image"]
    lens = analysis.logit_lens(model(), chat, positions="image", k=1)
    assert lens.tokens.shape[1] == 4


def test_a_reply_is_a_conversation_with_the_images():
    asked_now = model().chat(ONE, add_generation_prompt=True)
    kinds: list[list[str]] = []

    def keep(value: Tensor, hook: Any) -> None:
        kinds.append([label.part for label in hook.labels[0]] if hook.labels else [])

    with model().hooks([("blocks.0.hook_resid_pre", keep)]):
        ids = model().generate(asked_now, 2, **GREEDY)
    expected = model().generate(asked_now.inputs, 2, **GREEDY)
    assert torch.equal(ids, expected)
    assert kinds[0].count("image") == 4


BAD: list[tuple[Any, str, str]] = [
    (
        [asked(text("what <image>"), image())],
        TEMPLATE,
        "prompt 0 has 2 places for images, but 1 image",
    ),
    (ONE, WITHOUT, "prompt 0 has 0 places for images, but 1 image"),
    (
        TWO,
        IMAGES_FIRST,
        r"it is not certain that the image at character \d+ is of turn 2 \(user\), near text of turn 0",
    ),
    (ONE, "{% for m in messages %}<image>{% endfor %}", "its content was left out by the chat template; model.prepare"),
    ([asked({"type": "video", "video": "a.mp4"}, image())], TEMPLATE, r"message 0 \(user\) has a part of type 'video'"),
    ([{"role": "user", "content": ""}, asked(image())], TEMPLATE, r"message 0 \(user\) is empty"),
]


@pytest.mark.parametrize(("messages", "template", "says"), BAD)
def test_what_is_not_certain_is_refused(messages: Any, template: str, says: str):
    with pytest.raises(ValueError, match=says):
        model().chat(messages, chat_template=template)


def test_contents_are_given_in_parts_to_a_template_of_lists():
    chat = model().chat(ONE, chat_template=LISTS)
    assert chat.of({"turn": 1}).strip() == "red"
    assert len(chat.positions("image")) == 4


def test_tokens_that_the_text_does_not_tell_are_refused(monkeypatch: pytest.MonkeyPatch):
    from hooked_lm.models.vision import chats_with_images

    def another(*args: Any, **options: Any) -> Any:
        made = written(*args, **options)
        made.tokens[0, 0] = 7
        return made

    written = chats_with_images.written
    monkeypatch.setattr(chats_with_images, "written", another)
    with pytest.raises(
        ValueError, match=r"other tokens than those of its text with images, from token 0 on.*; model.prepare"
    ):
        model().chat(ONE)


def test_images_are_not_left_behind(tmp_path: Path):
    chat = model().chat(ONE)
    with pytest.raises(ValueError, match="image"):
        model()(chat.tokens)
    with pytest.raises(TypeError, match="a conversation with images is not saved"):
        chat.save(tmp_path / "chat")
    with pytest.raises(ValueError, match="conversations with images are not divided"):
        _ = model().chat([ONE, TWO])[0]
    with pytest.raises(ValueError, match="conversations with images are not joined"):
        joined([chat, chat])
    assert torch.equal(chat[0].tokens, chat.tokens)
    text_alone = HookedTransformer.from_pretrained("demo")
    with pytest.raises(ValueError, match=r"message 0 \(user\) has a part of type 'image', and this model reads text"):
        text_alone.chat(ONE, chat_template=TEMPLATE)


def test_conversations_without_images_are_those_of_text():
    messages = [asked(text("what is red ?"))]
    chat = model().chat(messages, add_generation_prompt=True)
    assert chat.inputs is None
    assert chat.of("user").strip() == "what is red ?"
    ids = model().generate(chat, 2, **GREEDY)
    assert torch.equal(ids[:, : chat.shape[1]], chat.tokens)
