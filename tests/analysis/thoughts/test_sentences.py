"""The sentences of thoughts: how texts are cut, and which tokens belong to which sentence."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooked_lm import HookedTransformer
from hooked_lm.analysis.thoughts.sentences import sentences_of, split_sentences
from tests.models.text.chat_templates import QWEN3


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    model = HookedTransformer.from_pretrained("demo")
    model.tokenizer.chat_template = QWEN3
    return model


def chat_of(model: HookedTransformer, thought: str, answer: str = "Yes."):
    said = {"role": "assistant", "reasoning_content": thought, "content": answer}
    return model.chat([{"role": "user", "content": "Why?"}, said])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two.", ["One.", " Two."]),
        ("It is 3.5, i.e.more.", ["It is 3.5, i.e.more."]),
        ('He said "no." Then? Yes!) So', ['He said "no."', " Then?", " Yes!)", " So"]),
        ("A line\n- and a point\n\nThe end", ["A line", "\n- and a point", "\n\nThe end"]),
        ("Wait... no.\n", ["Wait...", " no.\n"]),
        ("x", ["x"]),
        ("\u662f\u3002\u5417\uff1f", ["\u662f\u3002", "\u5417\uff1f"]),
    ],
)
def test_texts_are_cut_at_the_ends_of_sentences_and_lines(text, expected):
    assert split_sentences(text) == expected


@given(st.text(alphabet="ab .!?\n\"')", max_size=40))
def test_pieces_are_the_text_and_only_the_first_may_be_blank(text):
    pieces = split_sentences(text)
    assert "".join(pieces) == text
    assert all(piece.strip() for piece in pieces[1:])


@given(
    st.lists(
        st.sampled_from(["Mary left.", "So?", "I see 3.5!", "no stop", "\nA line", "Paris"]), min_size=1, max_size=6
    )
)
def test_sentences_partition_the_tokens_of_the_thought(model, pieces):
    chat = chat_of(model, " ".join(pieces))
    sentences = sentences_of(chat)
    spans = [position for one in sentences for position in range(one.start, one.stop)]
    assert spans == chat.positions("thinking")
    for one in sentences:
        text = model.tokenizer.decode(chat.tokens[0, one.start : one.stop])
        assert re.sub(r"\s", "", text) == re.sub(r"\s", "", one.text)


def test_only_the_last_thought_counts(model):
    first = {"role": "assistant", "reasoning_content": "Old. Older.", "content": "Yes."}
    second = {"role": "assistant", "reasoning_content": "New.", "content": "No."}
    thought = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    template = "{% for m in messages %}{{ m.role }}:" + thought
    chat = model.chat(
        [{"role": "user", "content": "Is it?"}, first, {"role": "user", "content": "Why?"}, second],
        chat_template=template + " {{ m.content }}\n{% endfor %}",
    )
    assert [one.text for one in sentences_of(chat)] == ["New."]


def test_what_cannot_be_cut_is_refused(model):
    chat = chat_of(model, "One. Two.")
    with pytest.raises(ValueError, match="pieces that are not blank"):
        sentences_of(chat, lambda text: text.split("."))
    with pytest.raises(ValueError, match="no token of its own"):
        sentences_of(chat_of(model, "I see Mary."), lambda text: ["I see M", "ary", "."])
    with pytest.raises(ValueError, match="one conversation, got 2"):
        sentences_of(model.chat([list(each) for each in (chat.messages[0], chat.messages[0])]))
    with pytest.raises(ValueError, match="selects no token"):
        sentences_of(model.chat([{"role": "user", "content": "Why?"}]))
