"""A conversation as token ids, and what each of its tokens is."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.hooks.token_labels import PADDING, TEMPLATE, Labels, TokenLabel, select_positions
from hooked_lm.models.text.chat_spans import THINKING, Message, Span, label_at, spans_of, thinks_at_end
from hooked_lm.models.text.tokenizer import ChatTokenizer, Tokenizer
from hooked_lm.models.text.tokens import Tokens, padded
from hooked_lm.notebook_repr import NotebookRepr, Table

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, eq=False)
class Chat(NotebookRepr):
    """One conversation or several, as the token ids that the chat template of a checkpoint makes of them; see `model.chat`.

    Attributes:
        tokens: ids [batch, pos], padded on the left.
        attention_mask: 1 for real tokens, 0 for padding.
        messages: of each conversation its messages.
        labels: of each conversation, for each column its `TokenLabel(turn, role, part)`.
        texts: what the template rendered.
        changed: what the template left out of messages, or wrote differently.
        shared: (row, position) of tokens with characters of two parts; they have the label of most of their characters.
        str_tokens: the tokens as strings.
        options: those of the template.
    """

    tokens: Int[Tensor, "batch pos"]
    attention_mask: Int[Tensor, "batch pos"]
    messages: tuple[tuple[Message, ...], ...]
    labels: tuple[Labels, ...]
    texts: tuple[str, ...]
    changed: tuple[str, ...]
    shared: tuple[tuple[int, int], ...]
    str_tokens: tuple[tuple[str, ...], ...]
    options: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def shape(self) -> torch.Size:
        """[batch, pos]."""
        return self.tokens.shape

    @property
    def turns(self) -> Int[Tensor, "batch pos"]:
        """The index of the message of each token; -1 for what the template adds, and for padding."""
        return torch.tensor([[label.turn for label in row] for row in self.labels])

    @property
    def roles(self) -> list[list[str]]:
        """The role of each token: that of its message, "template" or "padding"."""
        return [[label.role for label in row] for row in self.labels]

    @property
    def parts(self) -> list[list[str]]:
        """The part of its message that each token is of: "content", "thinking", "call" or "marker"; or "padding"."""
        return [[label.part for label in row] for row in self.labels]

    def positions(self, given: Any, row: int = 0) -> list[int]:
        """The columns of a conversation that named positions select, such as "assistant"; see `select_positions`."""
        return select_positions(self.labels[row], given)

    def mask(self, given: Any) -> Bool[Tensor, "batch pos"]:
        """Which tokens named positions select, in each conversation."""
        found = torch.zeros(self.shape, dtype=torch.bool)
        for row in range(len(self)):
            found[row, self.positions(given, row)] = True
        return found

    def of(self, given: Any, row: int = 0) -> str:
        """The text of the tokens that named positions select."""
        return "".join(self.str_tokens[row][position] for position in self.positions(given, row))

    def table(self, row: int = 0) -> Table:
        """Position, token, turn, role and part of each token of a conversation."""
        each = zip(self.str_tokens[row], self.labels[row], strict=True)
        rows = [(i, repr(token)[1:-1], *label) for i, (token, label) in enumerate(each) if label != PADDING]
        return Table(("position", "token", "turn", "role", "part"), rows)

    def repr_table(self) -> Table:
        """The first conversation, token by token."""
        return self.table()

    def __repr__(self) -> str:
        turns = Counter(label.role for row in self.labels for label in row if label != PADDING)
        counted = ", ".join(f"{n} {role}" for role, n in turns.items())
        which = f"{len(self)} conversations of " if len(self) > 1 else ""
        return f"Chat({which}{sum(turns.values())} tokens: {counted}{''.join('; ' + each for each in self.changed)})"

    def to(self, device: torch.device | str) -> "Chat":
        """The same on a device."""
        return replace(self, tokens=self.tokens.to(device), attention_mask=self.attention_mask.to(device))


def make_chat(tokens: Tokens, messages: Any, options: Mapping[str, Any]) -> Chat:
    """The conversation, or conversations, in the template of a tokenizer; see `model.chat`."""
    several = [messages] if messages and isinstance(messages[0], Mapping) else messages
    if not isinstance(several, (list, tuple)) or not several:
        raise ValueError(f"messages must be a list of messages, or of such lists; got {messages!r}")
    tokenizer = _with_template(tokens, options)
    rows = [_row(tokenizer, checked_messages(one), options) for one in several]
    ids, mask = padded([row.ids for row in rows], tokens.pad_id, "left")
    starts = [ids.shape[1] - len(row.ids) for row in rows]
    return Chat(
        tokens=ids,
        attention_mask=mask,
        messages=tuple(row.messages for row in rows),
        labels=tuple((PADDING,) * start + row.labels for start, row in zip(starts, rows, strict=True)),
        texts=tuple(row.text for row in rows),
        changed=tuple(each for row in rows for each in row.changed),
        shared=tuple(
            (i, start + j) for i, (start, row) in enumerate(zip(starts, rows, strict=True)) for j in row.shared
        ),
        str_tokens=tuple(tuple(tokens.to_str_tokens(row)) for row in ids),  # type: ignore[arg-type]  # strings of a row
        options=dict(options),
    )


class GrowingLabels:
    """The labels of conversations that a model continues: what it generates is the next turn of the assistant.

    Thoughts are what follows the opening marker of a template, until the closing one.
    """

    def __init__(self, chat: Chat, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rows = [[label for label in row if label != PADDING] for row in chat.labels]
        self._ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
        self._turns = [len(messages) for messages in chat.messages]
        self._written = [_after_last_turn(chat, row) for row in range(len(chat))]  # of the assistant's turn so far

    def of(self, real: Bool[Tensor, "batch pos"], tokens: Int[Tensor, "batch pos"]) -> Sequence[Labels]:
        """The labels of all real tokens of each row, of which the last ones may be new."""
        for row, labels in enumerate(self._rows):
            for token in tokens[row][real[row]][len(labels) :].tolist():
                labels.append(self._next(row, token))
        return self._rows

    def _next(self, row: int, token: int) -> TokenLabel:
        before = thinks_at_end(self._written[row])
        self._written[row] += self._tokenizer.decode([token], skip_special_tokens=False)
        after = thinks_at_end(self._written[row])
        is_marker = before != after or token in self._ends
        part = "marker" if is_marker else "thinking" if after else "content"
        return TokenLabel(self._turns[row], "assistant", part)


def _after_last_turn(chat: Chat, row: int) -> str:
    """The end of a conversation that the template wrote: the beginning of the next turn."""
    after = list(takewhile(lambda label: label.turn < 0, reversed(chat.labels[row])))
    return "".join(chat.str_tokens[row][len(chat.labels[row]) - len(after) :])


class _Row(NamedTuple):
    """One conversation before padding."""

    messages: tuple[Message, ...]
    text: str
    ids: list[int]
    labels: tuple[TokenLabel, ...]
    changed: tuple[str, ...]
    shared: list[int]


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


def _row(tokenizer: ChatTokenizer, messages: tuple[Message, ...], options: Mapping[str, Any]) -> _Row:
    def render(messages: Sequence[Message]) -> str:
        try:
            text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
            return text
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "jinja2":
                raise
            raise ValueError(f"the chat template refuses this conversation: {error}") from error

    found = spans_of(messages, render)
    encoded = tokenizer(found.text, add_special_tokens=False, return_offsets_mapping=True)
    labels, shared = _labels(found.spans, encoded["offset_mapping"])
    if GENERATION.search(options.get("chat_template") or tokenizer.get_chat_template(tools=options.get("tools"))):
        whole = tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **options
        )
        labels = _with_own_markers(labels, whole["assistant_masks"])
    return _Row(messages, found.text, encoded["input_ids"], tuple(labels), found.changed, shared)


def _labels(spans: Sequence[Span], offsets: Sequence[tuple[int, int]]) -> tuple[list[TokenLabel], list[int]]:
    """The label of most characters of each token, and the tokens with characters of two."""
    labels: list[TokenLabel] = []
    shared = []
    for i, (start, stop) in enumerate(offsets):
        counted = Counter(label_at(spans, place) or TEMPLATE for place in range(start, max(stop, start + 1)))
        labels.append(counted.most_common(1)[0][0])
        if len(counted) > 1:
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


def checked_messages(messages: Any) -> tuple[Message, ...]:
    """The messages, with content in parts as one text.

    Raises TypeError for what is no message, ValueError for one that says nothing, and for an image.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"a conversation is a list of at least one message, got {messages!r}")
    return tuple(_checked(i, message) for i, message in enumerate(messages))


def _checked(number: int, message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"message {number} must be a dict with 'role' and 'content', got {message!r}")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        if other := [part for part in content if not isinstance(part, Mapping) or part.get("type") != "text"]:
            kind = other[0].get("type") if isinstance(other[0], Mapping) else other[0]
            raise ValueError(
                f"message {number} ({message['role']}) has a part of type {kind!r}, and this model reads text: give the text "
                "alone, or a model that reads images, with model.prepare(messages)"
            )
        content = "".join(part["text"] for part in content)
        message = {**message, "content": content}
    if content is not None and not isinstance(content, str):
        raise TypeError(f"the content of message {number} ({message['role']}) must be text, got {content!r}")
    if not (content and content.strip()) and not message.get("tool_calls") and not any(map(message.get, THINKING)):
        raise ValueError(f"message {number} ({message['role']}) is empty: leave it out")
    return message
