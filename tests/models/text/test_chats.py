"""Which token of a conversation is whose, in templates with the structure of known ones, with tokenizers of four kinds."""

import json
import re
from dataclasses import fields
from datetime import date
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from hooked_lm.hooks.token_labels import PADDING, TEMPLATE
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import make_chat
from hooked_lm.models.text.growing_labels import GrowingLabels
from hooked_lm.models.text.tokens import Tokens
from tests.models.text.chat_templates import TEMPLATES, TOKENIZERS, call, turns

STRIP_NOTHING = ("chatml", "generation", "python_calls", "deepseek_r1")
EVERY = [(template, tokenizer) for template in TEMPLATES for tokenizer in TOKENIZERS]
WORDS = re.split("[|]", 'user|assistant|system|model|five|2 + 3|\n|\n\n|  |:|zq0x0az|[INST]|{x|"|é|🙂|日本|\\')
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


def stretches(chat: Chat, row: int = 0) -> list[tuple[int, str, str, str]]:
    """Turn, role, part and text of each stretch of tokens with one label."""
    found: list[tuple[int, str, str, str]] = []
    for label, several in groupby(enumerate(chat.labels[row]), key=lambda each: each[1]):
        columns = [column for column, _ in several]
        text = chat.texts[row][chat.offsets[row][columns[0]][0] : chat.offsets[row][columns[-1]][1]]
        found.append((*label, text))
    return found


def spoken(chat: Chat, row: int = 0) -> list[tuple[int, str, str]]:
    """Turn, part and text of each stretch of messages."""
    return [(turn, part, text) for turn, _, part, text in stretches(chat, row) if turn >= 0]


def content_of(chat: Chat, turn: int) -> str:
    """The text of the content of a turn."""
    return "".join(text for number, part, text in spoken(chat) if (number, part) == (turn, "content"))


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
        found, expected = content_of(chat, turn), message["content"]
        assert found.strip() == expected.strip()
        assert chat.shared or template not in STRIP_NOTHING or tokenizer != "byte_level" or found == expected


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=30, deadline=None)
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


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=8, deadline=None)
@given(several=st.lists(conversations(), min_size=2, max_size=3))
def test_a_batch_equals_its_conversations_one_by_one(tokenizer: str, several: list[list[dict[str, Any]]]):
    batch = chat_of(several, "chatml", tokenizer)
    for row, messages in enumerate(several):
        one, here = chat_of(messages, "chatml", tokenizer), batch[row]
        assert (
            here.tokens.tolist()
            == one.tokens.tolist()
            == [batch.tokens[row][batch.attention_mask[row].bool()].tolist()]
        )
        assert here.labels == one.labels
        assert here.offsets == one.offsets
        assert here.shared == one.shared
        assert here.str_tokens == one.str_tokens
        assert here.texts == one.texts
        assert here.changed == one.changed
        assert batch.mask("user")[row].sum() == one.mask("user").sum()
        padding = batch.shape[1] - one.shape[1]
        assert batch.roles[row][:padding] == ["padding"] * padding
        assert batch.positions("user", row) == [padding + position for position in one.positions("user")]
    assert batch[:].labels == batch.labels
    assert batch[[-1]].messages == batch.messages[-1:]


@pytest.mark.parametrize("template", ["chatml", "llama3", "deepseek_r1", "harmony", "generation"])
def test_a_conversation_is_the_beginning_of_a_longer_one(template: str):
    messages = turns("Hello", "Hi.", "What is 2 + 3?", "five", system="Be kind.")
    whole = chat_of(messages, template)
    for n in range(2, 5):
        part = chat_of(messages[:n], template)
        is_same = (
            template != "harmony" or messages[n - 1]["role"] == "user"
        )  # the end of the last answer is another marker
        assert whole.n_common(part) == part.n_common(whole) == part.shape[1] - (not is_same)


def test_a_template_that_changes_former_turns_says_so():
    messages = turns("Hi", "<think>\nOne\n</think>\n\nHello", "Why?")
    before, after = chat_of(messages[:2], "qwen3"), chat_of(messages, "qwen3")
    assert before.changed == ((),)
    assert after.changed == (("turn 1 (assistant): its thinking was left out by the chat template",),)
    assert after.n_common(before) == before.positions("thinking")[0] - 2  # all before "<think>\n"
    with pytest.raises(ValueError, match=re.escape("one conversation is compared with one, got 2 and 1: chat[0]")):
        chat_of([messages, messages], "qwen3").n_common(after)


# ---- the parts of a message in each template ------------------------------------------------------------------------

ASKED = {"role": "user", "content": "weather in Paris?"}
ANSWER = {"role": "assistant", "reasoning_content": "it is sunny", "content": "It is sunny."}
RESULT = {"role": "tool", "content": "sunny {5}"}


def calls(*given: dict[str, Any], **message: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [*given], **message}


ASKS = "0 content weather in Paris?"
OF_TOOLS = {"role": "assistant", "thinking": "easy", "content": "Yes"}


@pytest.mark.parametrize(
    ("template", "messages", "options", "expected"),
    [
        ("qwen3", [ASKED, calls(call("get", city="Par{is", n=5), reasoning_content="need it"), RESULT, ANSWER], {},
         [ASKS, "1 thinking need it", '1 call {"name": "get", "arguments": {"city": "Par{is", "n": 5}}', "2 content sunny {5}",
          "3 thinking it is sunny", "3 content It is sunny."]),
        ("qwen3", turns("a", "<think>\nb\n</think>\n\nc", "a", "<think>\nb\n</think>\n\nc"), {},
         ["0 content a", "1 content c", "2 content a", "3 thinking b", "3 content c"]),
        ("qwen3", [ASKED, calls(call("get"), call("put", d={"a": [1, 2]}), content="Let me"), ASKED], {"tools": [call("get")]},
         [ASKS, "1 content Let me", '1 call {"name": "get", "arguments": {}}',
          '1 call {"name": "put", "arguments": {"d": {"a": [1, 2]}}}', "2 content weather in Paris?"]),
        ("qwen3", [ASKED, calls({"name": "get", "arguments": '{"n": "}"}'})], {},
         [ASKS, '1 call {"name": "get", "arguments": {"n": "}"}}']),
        ("xml_calls", [ASKED, calls(call("get", x="a {b", n=5)), RESULT, ASKED], {},
         [ASKS, "1 call get>\n<parameter=x>\na {b\n</parameter>\n<parameter=n>\n5", "2 content sunny {5}",
          "3 content weather in Paris?"]),
        ("xml_calls", [ASKED, calls(call("get", f=[1, {"a": 2}]), call("put", b="}"))], {},
         [ASKS, '1 call get>\n<parameter=f>\n[1, {"a": 2}]', "1 call put>\n<parameter=b>\n}"]),
        ("python_calls", [ASKED, calls(call("get"), call("put", x='a "(b', z=True)), RESULT], {},
         [ASKS, "1 call get()", '1 call put(x="a \\"(b", z=true)', "2 content sunny {5}"]),
        ("llama3", [ASKED, calls(call("get", city="Paris", n=5)), RESULT], {},
         [ASKS, '1 call {"name": "get", "parameters": {"city": "Paris", "n": 5}}', "2 content sunny {5}"]),
        ("harmony", [*turns("Hi", system="S"), calls(call("get", city="Paris"), thinking="need it"), RESULT, OF_TOOLS], {},
         ["0 content S", "1 content Hi", "2 thinking need it",
          '2 call get<|channel|>commentary json<|message|>{"city": "Paris"}', "3 content sunny {5}", "4 thinking easy",
          "4 content Yes"]),
        ("deepseek_r1", turns("Hi", "I think\n</think>\nyes", system="S"), {"add_generation_prompt": True},
         ["0 content S", "1 content Hi", "2 content \nyes"]),
        ("chatml", turns("<think>x</think>", "<think>a</think>b<think>c</think>d"), {},
         ["0 content <think>x</think>", "1 thinking a", "1 content b", "1 thinking c", "1 content d"]),
        ("chatml", turns("x", "<think>\nI should"), {"continue_final_message": True}, ["0 content x", "1 thinking \nI should"]),
        ("mistral", turns("one", "two", "three", system="S"), {},
         ["1 content one", "2 content  two", "0 content S", "3 content three"]),
        ("gemma", turns("one ", system="S"), {}, ["0 content S", "1 content one"]),
        ("generation", turns("one", "two", "three"), {},
         ["0 content one", "1 content two", "1 marker <|im_end|>", "2 content three"]),
    ],
)  # fmt: skip
def test_the_parts_of_messages(template: str, messages: Any, options: dict[str, Any], expected: list[str]):
    found = spoken(chat_of(messages, template, **options))
    assert [f"{turn} {part} {text}" for turn, part, text in found] == expected


@pytest.mark.parametrize(
    ("template", "options", "text"),
    [
        ("llama3", {}, "Knowledge until: December 2023\nToday: 26 Jul 2024"),
        ("llama3", {"date_string": "1 May 2026"}, "Today: 1 May 2026"),
        ("harmony", {"reasoning_effort": "high"}, "Reasoning: high"),
        ("qwen3", {"add_generation_prompt": True, "enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
        ("deepseek_r1", {"add_generation_prompt": True}, "<|Assistant|><think>\n"),
        ("qwen3", {"tools": [call("get_weather")]}, "get_weather"),
        ("gemma", {"add_generation_prompt": True}, "<start_of_turn>model\n"),
    ],
)
def test_what_a_template_adds_is_the_templates(template: str, options: dict[str, Any], text: str):
    chat = chat_of(turns("Hi"), template, **options)
    assert text in "".join(text for _, role, _, text in stretches(chat) if role == "template")
    assert spoken(chat) == [(0, "content", "Hi")]
    assert chat.of("template").replace("Hi", "") == chat.texts[0].replace("Hi", "")


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("before", "text", "role"), [("", "hello", "user"), (" we", "ather", "user"), (" weath", "er", "template")]
)
def test_a_token_with_characters_of_two_parts_is_of_the_larger(before: str, text: str, role: str):
    chat = chat_of(turns(text), f"{before or ' '}{{{{ messages[0].content }}}}")
    assert (chat.shape, chat.shared) == ((1, 1), ((0, 0),))
    assert chat.labels[0][0].role == role


def test_the_same_object_may_be_several_messages():
    again = call("get", n="a")
    chat = chat_of([ASKED, calls(again, again), ASKED], "qwen3")
    assert [part for _, part, _ in spoken(chat)] == ["content", "call", "call", "content"]


def test_spaces_that_a_tokenizer_leaves_out_of_its_tokens_belong_to_the_message():
    tokens = tokens_of.__wrapped__("byte_level")
    tokenizer = tokens.need_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # type: ignore[union-attr]
    chat = make_chat(tokens, turns("five  "), {"chat_template": TEMPLATES["chatml"]})
    assert chat.of("user") == "five  "
    assert len(chat.positions("user")) == 4


# ---- what is no conversation, or none whose roles can be told -------------------------------------------------------

EACH = "{{% for m in messages %}}{}\n{{% endfor %}}"


@pytest.mark.parametrize(
    ("written", "character"),
    [
        ("{{ m.content | upper }}", 0),
        ("{{ m.content[:5] }}", 0),
        ("{{ m.content }} {{ m.content | length }}", 7),
        ("{{ 'Hello' if m.content == 'hi all' else m.content }}", 0),
        ("{{ m.content | replace('a', 'xy') if m.content.startswith('hi') else m.content }}", 1),
    ],
)
def test_a_template_that_rewrites_text_is_refused_with_the_place(written: str, character: int):
    with pytest.raises(
        ValueError, match=rf"what is of turn 0 \(user\) cannot be told from character {character} of the text on"
    ):
        chat_of(turns("hi all", "a longer answer"), EACH.format(written))


def test_a_template_that_writes_a_message_twice_or_in_other_words():
    twice = chat_of(turns("hi", "yes"), EACH.format("{{ m.content }}|{{ m.content }}"))
    assert spoken(twice) == [(0, "content", "hi")] * 2 + [(1, "content", "yes")] * 2
    escaped = chat_of(turns('a "b"', "yes"), EACH.format("{{ m | tojson }}"))
    text = json.dumps('a "b"')[1:-1]
    assert escaped.changed[0] == (f"turn 0 (user): its content is written as {text!r}",)
    assert spoken(escaped) == [(0, "content", text), (1, "content", "yes")]


def test_a_template_that_leaves_a_message_out_says_so_once():
    hidden = EACH.format("{% if m.role == 'user' %}{{ m.content }}{% endif %}")
    said = "turn 1 (assistant): its content was left out by the chat template"
    with pytest.warns(UserWarning, match=re.escape(said)) as warned:
        chat = chat_of([turns("hi", "yes"), turns("so", "no")], hidden)
    assert len(warned) == 1
    assert chat.changed == ((said,), (said,))
    assert repr(chat).endswith(f"; {said}; {said})")
    with pytest.warns(UserWarning, match="turn 1 .assistant.: its call was left out"):
        chat_of([ASKED, calls(call("get"), content="so")], "chatml")


IMAGE = [{"type": "text", "text": "See"}, {"type": "image", "url": "cat.png"}]


@pytest.mark.parametrize(
    ("messages", "error", "said"),
    [
        ([], ValueError, "messages must be a list of messages, or of such lists; got []"),
        ("Hi", ValueError, "messages must be a list of messages, or of such lists; got 'Hi'"),
        (ASKED, ValueError, "messages must be a list of messages, or of such lists; got {'role'"),
        ([[]], ValueError, "a conversation is a list of at least one message, got []"),
        ([ASKED, "Hi"], TypeError, "message 1 must be a dict with 'role' and 'content', got 'Hi'"),
        ([{"content": "Hi"}], TypeError, "message 0 must be a dict with 'role' and 'content'"),
        (turns("Hi", " \n"), ValueError, "message 1 (assistant) is empty: leave it out"),
        ([{"role": "user"}], ValueError, "message 0 (user) is empty: leave it out"),
        ([{"role": "user", "content": 5}], TypeError, "the content of message 0 (user) must be text, got 5"),
        ([{"role": "user", "content": IMAGE}], ValueError, "message 0 (user) has a part of type 'image', and this"),
        ([calls({"function": {}})], TypeError, "a call of message 0 (assistant) must be a dict with a 'name', got [{"),
    ],
)
def test_what_is_no_conversation(messages: Any, error: type[Exception], said: str):
    with pytest.raises(error, match=re.escape(said)):
        chat_of(messages, "chatml")


def test_content_in_parts_of_text_is_one_text():
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]
    assert spoken(chat_of([{"role": "user", "content": parts}], "chatml")) == [(0, "content", "Hello you")]


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        ("mistral", [ASKED, ASKED], "roles must alternate"),
        ("gemma", turns("a", "b")[1:], "user and assistant must alternate"),
        ("harmony", [ASKED, {"role": "assistant", "thinking": "x", "content": None}], ""),
        ("{% for m in messages %}", [ASKED], "Unexpected end of template"),
    ],
)
def test_what_a_template_refuses(template: str, messages: Any, said: str):
    with pytest.raises(ValueError, match=re.escape(f"the chat template refuses this conversation: {said}")):
        chat_of(messages, template)


def test_without_a_template_or_offsets():
    with pytest.raises(ValueError, match="the tokenizer has no chat template: load a model that was trained on conv"):
        make_chat(tokens_of(), [ASKED], {})
    slow = tokens_of.__wrapped__("word_level")
    tokenizer = slow.need_tokenizer()
    tokenizer.__class__ = type("Slow", (type(tokenizer),), {"is_fast": False})
    with pytest.raises(ValueError, match="slow tokenizers do not tell: load the fast tokenizer"):
        make_chat(slow, [ASKED], {"chat_template": TEMPLATES["chatml"]})


# ---- a conversation that goes on ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "messages", "options", "written", "expected"),
    [
        ("qwen3", turns("Hi"), {"add_generation_prompt": True}, "<think>one</think>five<|im_end|>",
         ["marker <think>", "thinking one", "marker </think>", "content five", "marker <|im_end|>"]),
        ("deepseek_r1", turns("Hi"), {"add_generation_prompt": True}, "one</think>five</s>",
         ["thinking one", "marker </think>", "content five", "marker </s>"]),
        ("qwen3", turns("Hi"), {"add_generation_prompt": True, "enable_thinking": False}, "five", ["content five"]),
        ("chatml", turns("Hi", "<think>one"), {"continue_final_message": True}, "two</think>five",
         ["thinking two", "marker </think>", "content five"]),
        ("chatml", turns("Hi", "<think>one</think>five"), {"continue_final_message": True}, "two", ["content two"]),
        ("harmony", turns("Hi"), {"add_generation_prompt": True},
         "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>five",
         ["marker <|channel|>analysis<|message|>", "thinking one",
          "marker <|end|><|start|>assistant<|channel|>final<|message|>", "content five"]),
    ],
)  # fmt: skip
def test_what_a_model_writes_gets_labels(template: str, messages: Any, options: Any, written: str, expected: Any):
    tokens = tokens_of()
    tokenizer = tokens.need_tokenizer()
    chat = chat_of([messages, turns("Hello there")], template, **options)
    growing = GrowingLabels(chat, tokenizer)
    new = tokenizer(written, add_special_tokens=False)["input_ids"]
    ids, real = chat.tokens, chat.attention_mask.bool()
    for token in new:
        ids = torch.cat([ids, torch.full((2, 1), token)], 1)
        real = torch.cat([real, torch.ones(2, 1, dtype=torch.bool)], 1)
        labels = growing.of(real, ids)
    found = [
        f"{part} {tokenizer.decode([token for _, token in several])}"
        for (_, _, part), several in groupby(zip(labels[0][-len(new) :], new, strict=True), key=lambda each: each[0])
    ]
    assert found == expected
    assert [label for label in chat.labels[0] if label != PADDING] == labels[0][: -len(new)]
    assert TEMPLATE in labels[1]
    assert {label.turn for label in labels[1][-len(new) :]} == {1}


def test_a_file_has_all_of_a_conversation(tmp_path: Path):
    chat = chat_of([turns("a", "<think>b</think>c"), turns("One", "two", system="é🙂")], "chatml", tools=[call("get")])
    chat.save(tmp_path / "chat")
    again = Chat.load(tmp_path / "chat")
    for field in fields(chat):
        found, expected = getattr(again, field.name), getattr(chat, field.name)
        assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected, field.name
    assert again.positions(("assistant", -1), 1) == chat.positions(("assistant", -1), 1)
    assert again.labels[0][-1].role == chat.labels[0][-1].role
    with pytest.raises(TypeError, match="not JSON serializable"):
        chat_of(turns("a"), "chatml", today=date(2026, 5, 1)).save(tmp_path / "other")


keys = st.text("abcdefgh_", min_size=1, max_size=6)
hostile = st.lists(st.sampled_from([*WORDS, "}", "{", "]", ")", "(", "'", "get", "5"]), max_size=4).map("".join)
leaves = hostile | st.integers(-99, 99) | st.booleans() | st.none() | st.floats(-9, 9)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2), max_leaves=4
)
arguments = st.dictionaries(keys, values, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("template", ["qwen3", "llama3", "harmony", "python_calls", "xml_calls"])
@settings(max_examples=60, deadline=None)
@given(several=st.lists(arguments, min_size=1, max_size=3), result=contents)
def test_a_call_has_its_name_and_its_arguments(template: str, several: list[dict[str, Any]], result: str):
    several = several[:1] if template in ("llama3", "harmony") else several  # which write one call
    given = [call(f"get_{'xyz'[i]}", **each) for i, each in enumerate(several)]
    chat = chat_of([ASKED, calls(*given), {"role": "tool", "content": result}, ANSWER], template)
    written = [text for turn, part, text in spoken(chat) if (turn, part) == (1, "call")]
    assert len(written) == len(given)
    for text, each in zip(written, given, strict=True):
        name, asked = each["function"]["name"], each["function"]["arguments"]
        if template in ("qwen3", "llama3"):
            key = "arguments" if template == "qwen3" else "parameters"
            assert json.loads(text) == {"name": name, key: asked}
        elif template == "harmony":
            assert asked or text == name
            assert not asked or json.loads(text.removeprefix(f"{name}<|channel|>commentary json<|message|>")) == asked
        elif template == "python_calls":
            listed = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in asked.items())
            assert text == f"{name}({listed})"
        elif template == "xml_calls":
            *_, (key, value) = [("", name), *asked.items()]
            last = json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)
            assert text.startswith(name)
            assert text.rstrip().endswith(last.rstrip())
            assert text.count("<parameter=") == len(asked)
