"""A conversation as token ids, and what each of its tokens is."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.files import names_the_file
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.hook_spec import HookList
from hooked_lm.hooks.own_run import OwnRun
from hooked_lm.hooks.token_labels import PADDING, PARTS, Labels, Named, TokenLabel, reading, select_positions
from hooked_lm.models.text.chat_spans import THINKING, Message
from hooked_lm.notebook_repr import NotebookRepr, Table

if TYPE_CHECKING:
    from hooked_lm.viz import View

FORMAT = "hooked_lm.Chat"
MOST_OF_A_CHARACTER = 8  # tokens


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

    def _reply(
        self, chat: "Chat", max_new_tokens: int, hooks: HookList, prefix: object, **options: object
    ) -> "Chat": ...


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
        n_before: how many tokens were cut off at the beginning.
        prefix: of a reply, the `Prefix` of what the model read, if it was kept; it is not saved.
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
    n_before: int = 0
    prefix: Any = None
    inputs: Any = None

    def run(self, model: HookedRootModule, forward: Callable[..., Any], *args: object, **options: object) -> Any:
        """The output of the model for the token ids; while it runs, hooks know what the tokens are."""
        if options.get("attention_mask") is None:
            options["attention_mask"] = self.attention_mask
        with reading(self.labels):
            return forward(self.tokens if self.inputs is None else self.inputs, *args, **options)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, which: int | slice | Sequence[int] | tuple[int | slice, slice]) -> "Chat":
        """Some of the conversations, without columns of padding alone; or `chat[row, start:stop]`, some columns of one.

        What is cut has the messages up to its end, the last one as far as it goes. Where the assistant is to go on, the model
        does, as with `add_generation_prompt=True` and `continue_final_message=True`.
        """
        if isinstance(which, tuple) and len(which) == 2 and isinstance(which[1], slice):
            return _cut(self[which[0]], which[1])
        given: Any = [which] if isinstance(which, int) else which
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
        return _text_at(self.positions(given, row), self.texts[row], self.offsets[row])

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

    def reply(
        self,
        model: "Talks",
        max_new_tokens: int = 100,
        hooks: HookList = (),
        prefix: object = None,
        **options: object,
    ) -> "Chat":
        """The conversations with the model's answer as a turn of the assistant, and its thoughts apart from the content.

        `hooks` act while the model writes; `options` are those of `model.generate`, such as `do_sample=False`. A conversation
        that ends within a turn of the assistant is continued there. If it does not end where the assistant begins, the template
        is asked for that. An answer that reaches `max_new_tokens` within a thought has only that.

        The answer to one conversation has the `prefix` of the tokens that the model read, also its own, except under hooks that
        depend on where a prompt ends. Give it to the next reply: what both begin with is not read again.

        Raises ValueError for an answer without text, and for a prefix of changed weights, another model or under other hooks.
        """
        answered: Chat = model._reply(self, max_new_tokens, hooks, prefix, **options)
        return answered

    def save(self, path: str | Path) -> None:
        """Writes the conversations to one safetensors file, atomically. Raises TypeError for options that are no JSON, and
        for images."""
        from hooked_lm.results import stored

        if self.inputs is not None:
            raise TypeError("a conversation with images is not saved: keep its messages, and the images as files")
        others = {of.name: getattr(self, of.name) for of in fields(self) if of.name not in ("inputs", "prefix")}
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


# ---- parts of conversations ------------------------------------------------------------------------------------------


def continued(chat: Chat, new: Sequence[int], labels: Labels, tokenizer: Decodes) -> Chat:
    """One conversation and what a model wrote after it, token by token; its last message is the turn that was written."""
    if not new:
        return chat
    text, offsets = chat.texts[0], [*chat.offsets[0]]
    for piece, n in _pieces(int(chat.tokens[0, -1]), new, tokenizer):
        offsets += [(len(text), len(text) + len(piece))] * n  # of a character of several tokens each has all
        text += piece
    all_labels, turn = (*chat.labels[0], *labels), labels[0].turn
    messages = chat.messages[0]
    begun = messages[turn] if turn < len(messages) else {"role": "assistant"}
    message = _message(begun, turn, all_labels, text, offsets, _key_of_thoughts(tokenizer, chat.options))
    after = {"add_generation_prompt": False, "continue_final_message": labels[-1].part != "marker"}
    return replace(
        chat,
        tokens=torch.cat([chat.tokens, chat.tokens.new_tensor([new])], 1),
        attention_mask=torch.cat([chat.attention_mask, chat.attention_mask.new_ones(1, len(new))], 1),
        labels=(all_labels,),
        texts=(text,),
        offsets=(tuple(offsets),),
        str_tokens=((*chat.str_tokens[0], *(tokenizer.decode([token]) for token in new)),),
        messages=((*messages[:turn], message),),
        options={**chat.options, **after},
    )


def _pieces(last: int, new: Sequence[int], tokenizer: Decodes) -> Iterator[tuple[str, int]]:
    """The text of new tokens after a last one, character by character where one has several tokens, with their number."""
    exact: dict[str, object] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before, now = [last], []
    for i, token in enumerate(new):
        now.append(token)
        text = tokenizer.decode([*before, *now], **exact)[len(tokenizer.decode(before, **exact)) :]
        if text.endswith("\ufffd") and len(now) < MOST_OF_A_CHARACTER and i + 1 < len(new):
            continue
        yield text, len(now)
        before, now = now, []


def _cut(chat: Chat, columns: slice) -> Chat:
    """Some columns of one conversation."""
    if len(chat) != 1:
        raise ValueError(f"columns are cut of one conversation, got {len(chat)}: chat[row, start:stop]")
    n, (start, stop, step) = chat.shape[1], columns.indices(chat.shape[1])
    if step != 1 or start >= stop:
        raise ValueError(f"[{columns.start}:{columns.stop}:{columns.step}] selects no adjacent tokens of {n}")
    if chat.inputs is not None:
        raise ValueError("a conversation with images is not cut: its images would be left behind")
    [labels], [offsets], [text] = chat.labels, chat.offsets, chat.texts
    cut = replace(
        chat,
        tokens=chat.tokens[:, start:stop],
        attention_mask=chat.attention_mask[:, start:stop],
        labels=(labels[start:stop],),
        offsets=(offsets[start:stop],),
        str_tokens=(chat.str_tokens[0][start:stop],),
        shared=tuple((0, place - start) for _, place in chat.shared if start <= place < stop),
        n_before=chat.n_before + start,
    )
    if stop == n:
        return cut
    kept, later = ({label.turn for label in some} for some in (labels[:stop], labels[stop:]))
    messages, text = list(chat.messages[0][: max(kept) + 1]), text[: offsets[stop - 1][1]]
    for turn in (kept & later) - {-1}:
        key = next((key for key in THINKING if messages[turn].get(key)), None)
        messages[turn] = _message(messages[turn], turn, labels[:stop], text, offsets, key)
    after = next((label for label in labels[stop:] if label.turn >= 0), labels[stop - 1])
    is_open, is_begun = after.role == "assistant", after.turn in kept
    options = {"add_generation_prompt": is_open and not is_begun, "continue_final_message": is_open and is_begun}
    return replace(cut, texts=(text,), messages=(tuple(messages),), options={**chat.options, **options})


def _message(
    begun: Message, turn: int, labels: Labels, text: str, offsets: Sequence[tuple[int, int]], key: str | None
) -> Message:
    """The message of a turn, as far as these tokens say it; its thoughts under a key, or within the content if that is None."""
    kept = {name: value for name, value in begun.items() if name not in ("content", "tool_calls", *THINKING)}
    here = [i for i, label in enumerate(labels) if label.turn == turn]
    if key is None:
        stretches = groupby(here, key=lambda i: labels[i])
        spoken = (_text_at(list(some), text, offsets).strip() for _, some in stretches)
        return {**kept, "content": _beginning(begun.get("content") or "", spoken)}
    said = {part: _text_at([i for i in here if labels[i].part == part], text, offsets).strip() for part in PARTS}
    thought = {key: said["thinking"]} if said["thinking"] else {}
    return {**kept, "content": said["content"], **thought}


def _beginning(content: str, spoken: Iterable[str]) -> str:
    """A content up to the last of some texts that follow each other in it."""
    end = 0
    for text in spoken:
        end = content.find(text, end) + len(text)
    return content[:end]


def _text_at(positions: Sequence[int], text: str, offsets: Sequence[tuple[int, int]]) -> str:
    """The text of the tokens at these positions, with what is between adjacent ones."""
    found, end, last = "", 0, -2
    for position in positions:
        start, stop = offsets[position]
        found += text[end if position == last + 1 else start : stop]
        end, last = max(end, stop), position
    return found


def _key_of_thoughts(tokenizer: Decodes, options: Mapping[str, Any]) -> str:
    """Under which key a template reads the thoughts of a message."""
    template = options.get("chat_template") or tokenizer.get_chat_template(tools=options.get("tools"))
    return next((key for key in THINKING if re.search(rf"[.'\"]{key}\b", template)), THINKING[0])


def asked_for_answer(chat: Chat, model: Talks) -> Chat:
    """Conversations that end where the assistant writes, or else with the beginning of an answer in their template."""
    if any(map(chat.options.get, ("add_generation_prompt", "continue_final_message"))):
        return chat
    return in_template(chat, chat.messages, model, add_generation_prompt=True)


def new_text(chat: Chat, n: int) -> str:
    """What the last tokens of one conversation say, without markers."""
    labels, end = chat.labels[0], chat.shape[1]
    said = [i for i in range(end - n, end) if labels[i].part != "marker"]
    return _text_at(said, chat.texts[0], chat.offsets[0]).strip()


def in_template(chat: Chat, messages: Sequence[Sequence[Message]], model: Talks, **options: object) -> Chat:
    """These messages in the same template with other options."""
    kept = {name: value for name, value in chat.options.items() if name != "continue_final_message"}
    made: Chat = model.chat([list(each) for each in messages], **{**kept, **options})
    return made
