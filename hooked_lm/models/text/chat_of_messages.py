"""Makes a `Chat` of messages, with the chat template of a tokenizer."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from hooked_lm.callers import warn_caller
from hooked_lm.hooks.token_labels import PADDING, TEMPLATE, TokenLabel
from hooked_lm.models.text.chat import Chat, Talks
from hooked_lm.models.text.chat_spans import THINKING, Message, Spans, label_at, spans_of
from hooked_lm.models.text.tokenizer import ChatTokenizer
from hooked_lm.models.text.tokens import Tokens, padded

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@runtime_checkable
class Renders(Protocol):
    """A tokenizer, or a processor, with the template of conversations."""

    def apply_chat_template(self, conversation: list[Any], **options: object) -> Any: ...


class ChatRow(NamedTuple):
    """One conversation before padding."""

    messages: tuple[Message, ...]
    text: str
    ids: list[int]
    labels: tuple[TokenLabel, ...]
    changed: tuple[str, ...]
    missing: tuple[str, ...]
    shared: list[int]
    offsets: tuple[tuple[int, int], ...]


def make_chat(tokens: Tokens, messages: object, options: Mapping[str, Any]) -> Chat:
    """The conversation, or conversations, in the template of a tokenizer; see `model.chat`."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages must be a list of messages, or of such lists; got {messages!r}")
    several = [messages] if isinstance(messages[0], Mapping) else messages
    tokenizer = _with_template(tokens, options)
    rows = [_row(tokenizer, checked_messages(one), options) for one in several]
    for each in dict.fromkeys(each for row in rows for each in row.missing):
        warn_caller(each)
    return chat_of_rows(tokens, rows, options)


def chat_of_rows(tokens: Tokens, rows: Sequence[ChatRow], options: Mapping[str, Any]) -> Chat:
    """The conversations as a batch, padded on the left."""
    ids, mask = padded([row.ids for row in rows], tokens.pad_id, "left")
    starts = [ids.shape[1] - len(row.ids) for row in rows]
    return Chat(
        tokens=ids,
        attention_mask=mask,
        messages=tuple(row.messages for row in rows),
        labels=tuple((PADDING,) * start + row.labels for start, row in zip(starts, rows, strict=True)),
        texts=tuple(row.text for row in rows),
        changed=tuple(row.changed for row in rows),
        shared=tuple(
            (i, start + j) for i, (start, row) in enumerate(zip(starts, rows, strict=True)) for j in row.shared
        ),
        offsets=tuple(((0, 0),) * start + row.offsets for start, row in zip(starts, rows, strict=True)),
        str_tokens=tuple(tuple(tokens.to_str_tokens(row)) for row in ids),  # type: ignore[arg-type]  # strings of a row
        options=dict(options),
    )


def joined(chats: Sequence[Chat]) -> Chat:
    """Several conversations of one length as a batch. Raises ValueError for other lengths, for padding, and for images."""
    if any(chat.inputs is not None for chat in chats):
        raise ValueError("conversations with images are not joined: give their messages to one model.chat")
    lengths = [chat.shape[1] for chat in chats]
    if len({*lengths}) != 1 or not all(bool(chat.attention_mask.all()) for chat in chats):
        raise ValueError(f"conversations of one length are joined, without padding; these have {lengths} tokens")
    starts = accumulate([len(chat) for chat in chats], initial=0)
    shared = ((row + start, place) for start, chat in zip(starts, chats, strict=False) for row, place in chat.shared)
    names = ("messages", "labels", "texts", "changed", "offsets", "str_tokens")
    of_rows: dict[str, Any] = {name: tuple(row for chat in chats for row in getattr(chat, name)) for name in names}
    tokens, mask = (torch.cat([getattr(chat, name) for chat in chats]) for name in ("tokens", "attention_mask"))
    return replace(chats[0], tokens=tokens, attention_mask=mask, shared=tuple(shared), **of_rows)


def begins_text(chat: Chat, tokenizer: object) -> bool:
    """Whether what follows each conversation begins a text, so that its first word has no leading space: it ends with white
    space, or with a special token of the template."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, one in added.items() if one.special}
    ends = zip(chat.texts, chat.tokens[:, -1].tolist(), strict=True)
    return all(text[-1:].isspace() or last in special for text, last in ends)


def conversations_in(prompts: object) -> list[Any] | None:
    """The conversations, if prompts are messages: those of one, or of several, each a list of messages or a mapping with
    "messages" and options of the template. None for other prompts.

    >>> hello = {"role": "user", "content": "Hello"}
    >>> [
    ...     len(conversations_in(each))
    ...     for each in ([hello, hello], [[hello], {"messages": [hello]}])
    ... ]
    [1, 2]
    """
    if isinstance(prompts, Mapping):
        return [prompts] if "messages" in prompts else None
    if not isinstance(prompts, (list, tuple)) or not prompts:
        return None
    if isinstance(prompts[0], Mapping) and "messages" not in prompts[0]:
        return [prompts]
    are_messages = isinstance(prompts[0], Mapping) or (
        isinstance(prompts[0], (list, tuple)) and prompts[0] and isinstance(prompts[0][0], Mapping)
    )
    return list(prompts) if are_messages else None


def as_prompts(model: object, conversations: Sequence[Any]) -> Chat:
    """Conversations up to where the assistant answers, or with `continue_final_message` where it goes on.

    Each is a list of messages, or a mapping with "messages" and options of the template. Raises ValueError as `model.chat`, for
    other options than those of the first, and for a model without `chat`.
    """
    if not isinstance(model, Talks):
        raise ValueError(f"the prompts are messages, which a {type(model).__name__} does not continue")
    rows = [each if isinstance(each, Mapping) else {"messages": each} for each in conversations]
    every = [{name: value for name, value in row.items() if name != "messages"} for row in rows]
    for number, (row, options) in enumerate(zip(rows, every, strict=True)):
        if "messages" not in row or options != every[0]:
            raise ValueError(
                f"conversation {number} has {', '.join(map(repr, row)) or 'nothing'}: it must have 'messages', and the options "
                f"of the first, {every[0]}"
            )
    messages = [_without_none(row["messages"]) for row in rows]
    return model.chat(messages, **{"add_generation_prompt": not every[0].get("continue_final_message"), **every[0]})


def transcript(conversation: object) -> str:
    """A conversation in a line, each message with its role.

    >>> transcript(
    ...     [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    ... )
    'user: Hello / assistant: Hi'
    """
    messages = conversation["messages"] if isinstance(conversation, Mapping) else conversation
    assert isinstance(messages, (list, tuple)), "messages, as `conversations_in` knows them"
    return " / ".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


def _without_none(messages: object) -> object:
    """Messages without the keys that files and tables fill with None, where another message has them."""
    if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
        return messages
    return [
        {name: value for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]


def _with_template(tokens: Tokens, options: Mapping[str, Any]) -> ChatTokenizer:
    """The tokenizer; ValueError if it has no template, or no offsets."""
    tokenizer = tokens.need_tokenizer()
    if not isinstance(tokenizer, ChatTokenizer) or not (options.get("chat_template") or tokenizer.chat_template):
        raise ValueError(
            "the tokenizer has no chat template: load a model that was trained on conversations, or give chat_template=..., "
            "the text of one"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            "roles need the places of tokens in the text, which slow tokenizers do not tell: load the fast tokenizer"
        )
    return tokenizer


def rendered(template: Renders, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """The text that the template of a tokenizer, or of a processor, makes of messages; ValueError for what it refuses."""
    try:
        text: str = template.apply_chat_template(list(messages), tokenize=False, **options)
        return text
    except Exception as error:  # of the template, such as a role that it does not know, or content that it cannot add
        raise ValueError(f"the chat template refuses this conversation: {error}") from error


def _row(tokenizer: ChatTokenizer, messages: tuple[Message, ...], options: Mapping[str, Any]) -> ChatRow:
    found = spans_of(messages, lambda some: rendered(tokenizer, some, options))
    encoded = tokenizer(found.text, add_special_tokens=False, return_offsets_mapping=True)
    labels, offsets, shared = labelled(found, encoded["offset_mapping"])
    if GENERATION.search(options.get("chat_template") or tokenizer.get_chat_template(tools=options.get("tools"))):
        whole = tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **options
        )
        labels = _with_own_markers(labels, whole["assistant_masks"])
    return ChatRow(
        messages, found.text, encoded["input_ids"], tuple(labels), found.changed, found.missing, shared, offsets
    )


def labelled(
    found: Spans, places: Sequence[tuple[int, int]]
) -> tuple[list[TokenLabel], tuple[tuple[int, int], ...], list[int]]:
    """Of tokens at these places in a text the labels, the places, and which of them have characters of two parts."""
    offsets = tuple(_with_spaces(places))
    labels, shared = _labels(found, offsets)
    return labels, offsets, shared


def _with_spaces(offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The characters of each token, also of those of spaces alone, where a tokenizer leaves spaces out of them."""
    before = 0
    for start, stop in offsets:
        yield (min(before, start) if start == stop else start), stop
        before = stop


def _labels(found: Spans, offsets: Sequence[tuple[int, int]]) -> tuple[list[TokenLabel], list[int]]:
    """The label of most characters of each token, and the tokens with characters of two.

    Spaces count in tokens of spaces alone, and a message counts more than the template: " a" after "[INST]" is the user's.
    """
    labels: list[TokenLabel] = []
    shared = []
    for i, (start, stop) in enumerate(offsets):
        places = range(start, max(stop, start + 1))
        each = {place: label_at(found.spans, place) or TEMPLATE for place in places}
        counted = Counter(each[place] for place in places if found.text[place : place + 1].strip()) or Counter(
            each.values()
        )
        labels.append(max(counted, key=lambda label: (counted[label], label.turn >= 0)))
        if len({*each.values()}) > 1:
            shared.append(i)
    return labels, shared


def _with_own_markers(labels: Sequence[TokenLabel], generated: Sequence[int]) -> list[TokenLabel]:
    """The labels where a template says what the assistant generates: also the markers in it, such as the end of a turn."""
    found, turn = list(labels), -1
    for i in [
        *range(len(labels)),
        *reversed(range(len(labels))),
    ]:  # a marker may come before the first text of its turn
        if not generated[i]:
            turn = -1
        elif found[i].turn >= 0:
            turn = found[i].turn
        elif turn >= 0:
            found[i] = TokenLabel(turn, "assistant", "marker")
    return found


def checked_messages(messages: object, reads_images: bool = False) -> tuple[Message, ...]:
    """The messages, with content in parts as one text; in parts still for a model that reads images, if there are any.

    Raises TypeError for what is no message, ValueError for one that says nothing, and for an image that the model does not read.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"a conversation is a list of at least one message, got {messages!r}")
    return tuple(_checked(i, message, reads_images) for i, message in enumerate(messages))


def _checked(number: int, message: object, reads_images: bool) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"message {number} must be a dict with 'role' and 'content', got {message!r}")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        others = [part for part in content if not isinstance(part, Mapping) or not isinstance(part.get("text"), str)]
        if (
            others
            and reads_images
            and all(isinstance(part, Mapping) and part.get("type") == "image" for part in others)
        ):
            return message
        if other := others:
            kind = other[0].get("type") if isinstance(other[0], Mapping) else other[0]
            raise ValueError(
                f"message {number} ({message['role']}) has a part of type {kind!r}, and this model reads text: give the text "
                "alone, or a model that reads images, with model.prepare(messages)"
            )
        content = "".join(part["text"] for part in content)
        message = {**message, "content": content}
    if content is not None and not isinstance(content, str):
        raise TypeError(f"the content of message {number} ({message['role']}) must be text, got {content!r}")
    calls = message.get("tool_calls") or ()
    names = [call.get("function", call).get("name") if isinstance(call, Mapping) else None for call in calls]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"a call of message {number} ({message['role']}) must be a dict with a 'name', got {calls!r}")
    if not (content and content.strip()) and not calls and not any(map(message.get, THINKING)):
        raise ValueError(f"message {number} ({message['role']}) is empty: leave it out")
    return message
