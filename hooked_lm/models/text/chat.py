"""A conversation as token ids, and what each of its tokens is."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.files import names_the_file
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.own_run import OwnRun
from hooked_lm.hooks.token_labels import PADDING, Labels, Named, TokenLabel, reading, select_positions
from hooked_lm.models.text.chat_spans import THINKING, Message, is_header_at_end, thinks_at_end
from hooked_lm.notebook_repr import NotebookRepr, Table

if TYPE_CHECKING:
    from hooked_lm.viz import View

FORMAT = "hooked_lm.Chat"


@runtime_checkable
class Decodes(Protocol):
    """A tokenizer with the template of conversations, which says which of its tokens are special."""

    added_tokens_decoder: Any

    def decode(self, token_ids: list[int], **options: object) -> Any: ...

    def get_chat_template(self, chat_template: str | None = None, tools: object = None) -> str: ...


@runtime_checkable
class Talks(Protocol):
    """A model that continues conversations."""

    tokenizer: Any

    def chat(self, messages: Sequence[Any], **options: object) -> "Chat": ...

    def generate(self, input: "Chat", max_new_tokens: int, **options: object) -> Any: ...

    def hooks(self, fwd_hooks: object) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True, eq=False)
class Chat(OwnRun, NotebookRepr):
    """One conversation or several, as the token ids that the chat template of a checkpoint makes of them; see `model.chat`.

    Attributes:
        tokens: ids [batch, pos], padded on the left.
        attention_mask: 1 for real tokens, 0 for padding.
        messages: of each conversation its messages.
        labels: of each conversation, for each column its `TokenLabel(turn, role, part)`.
        texts: what the template rendered.
        changed: of each conversation, what the template left out of messages, or wrote differently.
        shared: (row, position) of tokens with characters of two parts; they have the label of most of their characters.
        offsets: of each conversation, for each column the characters (start, stop) of its text that the token is.
        str_tokens: the tokens as strings.
        options: those of the template.
        inputs: the ids with their images, for a model that reads images; None without any.
    """

    tokens: Int[Tensor, "batch pos"]
    attention_mask: Int[Tensor, "batch pos"]
    messages: tuple[tuple[Message, ...], ...]
    labels: tuple[Labels, ...]
    texts: tuple[str, ...]
    changed: tuple[tuple[str, ...], ...]
    shared: tuple[tuple[int, int], ...]
    offsets: tuple[tuple[tuple[int, int], ...], ...]
    str_tokens: tuple[tuple[str, ...], ...]
    options: Mapping[str, Any]
    inputs: Any = None

    def run(self, model: HookedRootModule, forward: Callable[..., Any], *args: object, **options: object) -> Any:
        """The output of the model for the token ids; while it runs, hooks know what the tokens are."""
        if options.get("attention_mask") is None:
            options["attention_mask"] = self.attention_mask
        with reading(self.labels):
            return forward(self.tokens if self.inputs is None else self.inputs, *args, **options)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, which: int | slice | Sequence[int]) -> "Chat":
        """Some of the conversations, without columns of padding alone."""
        given = [which] if isinstance(which, int) else which
        rows = [*range(len(self))[given]] if isinstance(given, slice) else [range(len(self))[row] for row in given]
        kept = self.attention_mask[rows]
        first = int(kept.any(0).int().argmax())
        if self.inputs is not None and (first or rows != [*range(len(self))]):
            raise ValueError("conversations with images are not divided: make each alone, with model.chat(messages)")
        return replace(
            self,
            tokens=self.tokens[rows, first:],
            attention_mask=kept[:, first:],
            labels=tuple(self.labels[row][first:] for row in rows),
            offsets=tuple(self.offsets[row][first:] for row in rows),
            str_tokens=tuple(self.str_tokens[row][first:] for row in rows),
            shared=tuple((rows.index(row), place - first) for row, place in self.shared if row in rows),
            messages=tuple(self.messages[row] for row in rows),
            texts=tuple(self.texts[row] for row in rows),
            changed=tuple(self.changed[row] for row in rows),
        )

    @classmethod
    def joined(cls, chats: Sequence["Chat"]) -> "Chat":
        """Several conversations of one length as a batch. Raises ValueError for other lengths, and for padding."""
        lengths = [chat.shape[1] for chat in chats]
        if any(chat.inputs is not None for chat in chats):
            raise ValueError("conversations with images are not joined: give their messages to one model.chat")
        if len({*lengths}) != 1 or not all(bool(chat.attention_mask.all()) for chat in chats):
            raise ValueError(f"conversations of one length are joined, without padding; these have {lengths} tokens")
        starts = accumulate([len(chat) for chat in chats], initial=0)
        shared = (
            (row + start, place) for start, chat in zip(starts, chats, strict=False) for row, place in chat.shared
        )
        names = ("messages", "labels", "texts", "changed", "offsets", "str_tokens")
        of_rows: dict[str, Any] = {name: tuple(row for chat in chats for row in getattr(chat, name)) for name in names}
        return replace(
            chats[0],
            tokens=torch.cat([chat.tokens for chat in chats]),
            attention_mask=torch.cat([chat.attention_mask for chat in chats]),
            shared=tuple(shared),
            **of_rows,
        )

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
        """The part of its message that each token is of: "content", "thinking", "call", "image" or "marker"; or
        "padding"."""
        return [[label.part for label in row] for row in self.labels]

    def positions(self, given: Named, row: int = 0) -> list[int]:
        """The columns of a conversation that named positions select, such as "assistant"; see `select_positions`."""
        return select_positions(self.labels[row], given)

    def mask(self, given: Named) -> Bool[Tensor, "batch pos"]:
        """Which tokens named positions select, in each conversation."""
        found = torch.zeros(self.shape, dtype=torch.bool)
        for row in range(len(self)):
            found[row, self.positions(given, row)] = True
        return found

    def of(self, given: Named, row: int = 0) -> str:
        """The text of the tokens that named positions select, as the template wrote it."""
        text, places = "", self.offsets[row]
        end, last = 0, -2
        for position in self.positions(given, row):
            start, stop = places[position]
            text += self.texts[row][end if position == last + 1 else start : stop]
            end, last = max(end, stop), position
        return text

    def begins_text(self, tokenizer: object) -> bool:
        """Whether what follows each conversation begins a text, so that its first word has no leading space: it ends with white
        space, or with a special token of the template."""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token for token, one in added.items() if one.special}
        ends = zip(self.texts, self.tokens[:, -1].tolist(), strict=True)
        return all(text[-1:].isspace() or last in special for text, last in ends)

    def n_common(self, other: "Chat") -> int:
        """How many tokens two conversations have in common at their beginnings; ValueError if one of them is several."""
        if len(self) != 1 or len(other) != 1:
            raise ValueError(f"one conversation is compared with one, got {len(self)} and {len(other)}: chat[0]")
        pairs = zip(self.tokens[0].tolist(), other.tokens[0].tolist(), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def table(self, row: int = 0) -> Table:
        """Position, token, turn, role and part of each token of a conversation."""
        each = zip(self.str_tokens[row], self.labels[row], strict=True)
        rows = [(i, repr(token)[1:-1], *label) for i, (token, label) in enumerate(each) if label != PADDING]
        return Table(("position", "token", "turn", "role", "part"), rows)

    def show(
        self, values: "Sequence[float] | Tensor | None" = None, row: int = 0, title: str = "Conversation"
    ) -> "View":
        """A view of a conversation, with the role of each turn; `values`, a number for each token, colour its text."""
        from hooked_lm.viz import conversation  # not when a model starts

        kept = [i for i, label in enumerate(self.labels[row]) if label != PADDING]
        tokens, labels = [self.str_tokens[row][i] for i in kept], [self.labels[row][i] for i in kept]
        if values is not None and len(values) == len(self.labels[row]):
            values = [float(values[i]) for i in kept]
        return conversation(tokens, labels, values, title=title)

    def repr_table(self) -> Table:
        """The first conversation, token by token."""
        return self.table()

    def __repr__(self) -> str:
        turns = Counter(label.role for row in self.labels for label in row if label != PADDING)
        counted = ", ".join(f"{n} {role}" for role, n in turns.items())
        which = f"{len(self)} conversations of " if len(self) > 1 else ""
        changed = "".join(f"; {each}" for row in self.changed for each in row)
        return f"Chat({which}{sum(turns.values())} tokens: {counted}{changed})"

    def reply(self, model: "Talks", max_new_tokens: int = 100, hooks: object = (), **options: object) -> "Chat":
        """The conversations with the model's answer as a turn of the assistant, and its thoughts apart from the content.

        `hooks` act while the model writes; `options` are those of `model.generate`, such as `do_sample=False`. If the
        conversations do not end where the assistant begins, the template is asked for that. An answer that reaches
        `max_new_tokens` within a thought has only that. Raises ValueError for an answer without text.
        """
        asked = (
            self if self.options.get("add_generation_prompt") else self._in_template(model, add_generation_prompt=True)
        )
        labels = GrowingLabels(asked, model.tokenizer)
        with model.hooks(hooks):
            ids = model.generate(asked, max_new_tokens, return_type="tokens", **options)
        prompt = asked.attention_mask.bool()
        real = torch.cat([prompt, torch.ones_like(ids[:, prompt.shape[1] :], dtype=torch.bool)], 1)
        rows = labels.of(real, ids)
        answers = []
        for row, ids_of_row in enumerate(ids[:, prompt.shape[1] :].tolist()):
            new = list(zip(rows[row][int(prompt[row].sum()) :], ids_of_row, strict=True))
            answers.append(_answer(row, new, model.tokenizer, self.options))
        return self._in_template(model, answers, add_generation_prompt=False)

    def _in_template(self, model: "Talks", more: Sequence[Message] | None = None, **options: object) -> "Chat":
        """The same messages, and one more each, in the same template with other options."""
        rows = [list(messages) for messages in self.messages]
        if more is not None:
            rows = [[*messages, message] for messages, message in zip(rows, more, strict=True)]
        made: Chat = model.chat(rows, **{**self.options, **options})
        return made

    def save(self, path: str | Path) -> None:
        """Writes the conversations to one safetensors file, atomically. Raises TypeError for options that are no JSON, and
        for images."""
        from hooked_lm.results import stored

        if self.inputs is not None:
            raise TypeError("a conversation with images is not saved: keep its messages, and the images as files")
        others = {of.name: getattr(self, of.name) for of in fields(self) if of.name != "inputs"}
        tensors = {name: others.pop(name) for name in ("tokens", "attention_mask")}
        stored.write(path, FORMAT, tensors, others)

    @classmethod
    @names_the_file
    def load(cls, path: str | Path) -> "Chat":
        """Reads what `save` wrote. Raises ValueError for any other file."""
        from hooked_lm.results import stored

        tensors, others = stored.read(path, FORMAT)
        others["labels"] = [[TokenLabel(*label) for label in row] for row in others["labels"]]
        others["offsets"] = [[tuple(place) for place in row] for row in others["offsets"]]
        for name in ("messages", "labels", "changed", "shared", "offsets", "str_tokens"):
            others[name] = tuple(map(tuple, others[name]))
        return cls(**{**tensors, **others, "texts": tuple(others["texts"])})

    def to(self, device: torch.device | str) -> "Chat":
        """The same on a device."""
        inputs = None if self.inputs is None else self.inputs.to(device)
        tokens, mask = self.tokens.to(device), self.attention_mask.to(device)
        return replace(self, tokens=tokens, attention_mask=mask, inputs=inputs)


class GrowingLabels:
    """The labels of conversations that a model continues: what it generates is the next turn of the assistant.

    A conversation that ends within a turn of the assistant is continued there. Thoughts are what follows the opening marker of a
    template, until the closing one.
    """

    def __init__(self, chat: Chat, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._rows = [[label for label in row if label != PADDING] for row in chat.labels]
        self._markers = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self._turns = [_next_turn(chat, row) for row in range(len(chat))]
        self._written = [_written_in(chat, row, turn) for row, turn in enumerate(self._turns)]

    def of(self, real: Bool[Tensor, "batch pos"], tokens: Int[Tensor, "batch pos"]) -> Sequence[Labels]:
        """The labels of all real tokens of each row, of which the last ones may be new."""
        for row, labels in enumerate(self._rows):
            for token in tokens[row][real[row]][len(labels) :].tolist():
                labels.append(self._next(row, token))
        return self._rows

    def _next(self, row: int, token: int) -> TokenLabel:
        before = self._written[row]
        after = self._written[row] = before + self._tokenizer.decode([token], skip_special_tokens=False)
        thinks = thinks_at_end(after)
        is_marker = thinks != thinks_at_end(before) or is_header_at_end(after) or token in self._markers
        return TokenLabel(self._turns[row], "assistant", "marker" if is_marker else "thinking" if thinks else "content")


def _answer(row: int, new: Sequence[tuple[TokenLabel, int]], tokenizer: Decodes, options: Mapping[str, Any]) -> Message:
    """The message that new tokens are, with thoughts under the key that the template reads."""
    texts = {
        part: tokenizer.decode([token for label, token in new if label.part == part], skip_special_tokens=True).strip()
        for part in ("thinking", "content")
    }
    if not any(texts.values()):
        raise ValueError(
            f"the answer of conversation {row} has no text: {len(new)} tokens, all of them markers or blank"
        )
    template = options.get("chat_template") or tokenizer.get_chat_template(tools=options.get("tools"))
    key = next((key for key in THINKING if re.search(rf"[.'\"]{key}\b", template)), THINKING[0])
    thought = {key: texts["thinking"]} if texts["thinking"] else {}
    return {"role": "assistant", "content": texts["content"], **thought}


def _next_turn(chat: Chat, row: int) -> int:
    """The turn that a model goes on with."""
    last = chat.labels[row][-1]
    return last.turn if last.role == "assistant" and last.part != "marker" else len(chat.messages[row])


def _written_in(chat: Chat, row: int, turn: int) -> str:
    """What the template wrote of a turn at the end of a conversation."""
    n = sum(1 for _ in takewhile(lambda label: label.turn in (-1, turn), reversed(chat.labels[row])))
    return chat.texts[row][chat.offsets[row][-n][0] :] if n else ""
