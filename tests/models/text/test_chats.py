"""Which token of a conversation is whose, in templates with the structure of known ones, with tokenizers of four kinds."""

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hooked_lm.hooks.token_labels import PADDING, TEMPLATE
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import make_chat
from hooked_lm.models.text.tokens import Tokens
from tests.models.text.chat_templates import STRIPS, TEMPLATES, TOKENIZERS, call, turns

EVERY = [(template, tokenizer) for template in TEMPLATES for tokenizer in TOKENIZERS]
WORDS = ["user", "assistant", "system", "model", "five", "2 + 3", "\n", "\n\n", "  ", ":", "zq0x0az", "[INST]", "{x", '"', "é", "🙂", "日本", "\\"]  # fmt: skip
texts = st.lists(st.sampled_from([*WORDS, "a"]) | st.text(max_size=4), min_size=1, max_size=6).map("".join)
contents = texts.filter(lambda text: text.strip())


@lru_cache
def tokens_of(name: str = "byte_level") -> Tokens:
    tokenizer = TOKENIZERS[name]()
    return Tokens(tokenizer, default_prepend_bos=False, default_padding_side="left", n_ctx=4096, d_vocab=len(tokenizer))


def chat_of(messages: Any, template: str, tokenizer: str = "byte_level", **options: Any) -> Chat:
    """The conversation in a template of the module, or in the text of one."""
    return make_chat(tokens_of(tokenizer), messages, {"chat_template": TEMPLATES.get(template, template), **options})


@st.composite
def conversations(draw: st.DrawFn, content: st.SearchStrategy[str] = contents) -> list[dict[str, Any]]:
    """A user and an assistant in turn, with or without a system."""
    spoken = draw(st.lists(content, min_size=1, max_size=4))
    if draw(st.booleans()):
        spoken = spoken * 2  # the same texts again
    return turns(*spoken, system=draw(st.none() | content))


def content_of(chat: Chat, turn: int, row: int = 0) -> str:
    """The text of the content of a turn, without the characters that its first and last token share with others."""
    columns = [i for i, label in enumerate(chat.labels[row]) if label.turn == turn and label.part == "content"]
    return chat.texts[row][chat.offsets[row][columns[0]][0] : chat.offsets[row][columns[-1]][1]] if columns else ""


@pytest.mark.slow
@pytest.mark.parametrize(("template", "tokenizer"), EVERY)
@settings(max_examples=30, deadline=None)
@given(messages=conversations(), prompt=st.booleans())
def test_the_content_of_a_turn_is_the_text_of_its_message(
    template: str, tokenizer: str, messages: list[dict[str, Any]], prompt: bool
):
    if template == "mistral" and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # the text of the system goes with the last one, if it is the user's
    chat = chat_of(messages, template, tokenizer, add_generation_prompt=prompt)
    ids = tokens_of(tokenizer).need_tokenizer().apply_chat_template(
        messages, chat_template=TEMPLATES[template], add_generation_prompt=prompt, return_dict=False
    )  # fmt: skip
    assert chat.tokens[0].tolist() == ids
    assert not chat.changed[0]
    for turn, message in enumerate(messages):
        assert content_of(chat, turn).strip() == message["content"].strip()


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_turn_has_the_tokens_with_its_characters(template: str, data: st.DataObject):
    """The characters of a turn occur in no other, so that each token says by itself whose it is."""
    alphabets = [[chr(start + i) for i in range(64)] for start in (0x3041, 0x0430, 0x05D0, 0x0E01, 0x1780)]
    spoken = [data.draw(st.text([*alphabet, " "], min_size=1, max_size=9)) for alphabet in alphabets]
    spoken = [f"{alphabet[0]}{text}{alphabet[1]}" for alphabet, text in zip(alphabets, spoken, strict=True)]
    chat = chat_of(turns(*spoken[1:4], system=spoken[0]), template)
    for label, (start, stop) in zip(chat.labels[0], chat.offsets[0], strict=True):
        text = chat.texts[0][start:stop].strip()
        whose = {turn for turn, alphabet in enumerate(alphabets) if set(text) & set(alphabet)}
        assert whose <= {label.turn}, (text, label)
