"""Finds which characters of a rendered conversation come from which message.

The checkpoint's own template renders the conversation twice: as it is, and with a mark before and after each text of each
message. Without the marks both must be the same string; then a mark in the second gives the exact place of a text in the first,
whatever the template does around it: folding a system message into a user turn, dropping former thoughts, adding a date.
"""

import copy
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hooked_lm.hooks.token_labels import TokenLabel

Message = Mapping[str, Any]
Path = tuple[Any, ...]  # of keys and indices into the list of messages
Places = Mapping[
    int, Sequence[tuple[str, int]]
]  # of each piece its marks ("a": before, "b": after), with their places in a text
Around = Callable[[str, str, str], str]
THINKING = ("reasoning_content", "reasoning", "thinking")  # keys of a message
MARKERS = (  # between which templates write thoughts
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
OPENERS, CLOSERS = "([{", ")]}"


class Span(NamedTuple):
    """Characters [start, stop) of a rendered conversation, and whose they are."""

    start: int
    stop: int
    label: TokenLabel


class Spans(NamedTuple):
    """A rendered conversation: its text, its spans in order, and what the template left out or wrote differently."""

    text: str
    spans: tuple[Span, ...]
    changed: tuple[str, ...]


class Piece(NamedTuple):
    """A text of a message: characters [start, stop) of the string at `path`, or a whole call (of the message's `path`)."""

    path: Path
    start: int
    stop: int
    label: TokenLabel

    def text(self, messages: Sequence[Message]) -> str:
        """The text itself."""
        found = at(messages, self.path)
        return found[self.start : self.stop] if isinstance(found, str) else ""


def spans_of(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> Spans:
    """The spans of the messages in what `render` makes of them. Raises ValueError if they cannot be told for certain."""
    text, pieces = render(messages), list(_pieces(messages))
    marks = _Marks(text, [piece.text(messages) for piece in pieces])

    def places(numbers: Sequence[int], around: Around) -> tuple[str, Places]:
        return marks.removed_from(render(_marked(messages, pieces, numbers, marks, around)))

    plain, found = places(range(len(pieces)), _outside)
    if plain != text:
        found = dict[int, Sequence[tuple[str, int]]]()
        for i, piece in enumerate(pieces):
            found |= _places_of_one(text, piece, [places([i], around) for around in (_outside, _inside, _at_the_end)])
    return Spans(text, *_found(messages, pieces, text, found))


def _places_of_one(text: str, piece: Piece, tried: Sequence[tuple[str, "Places"]]) -> "Places":
    """The marks of one piece in the first way of marking that changes nothing else; raises ValueError if there is none."""
    for plain, found in tried:
        if plain == text:
            return found
    same = max(_n_equal(plain, text) for plain, _ in tried)
    raise ValueError(
        f"what is of turn {piece.label.turn} ({piece.label.role}) cannot be told from character {same} of the text on, near "
        f"{text[max(0, same - 30) : same + 30]!r}: the chat template does not simply put in its {piece.label.part}, but writes "
        "other text there if it is another"
    )


def _n_equal(one: str, other: str) -> int:
    """How many characters at the beginning are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def thinks_at_end(text: str) -> bool:
    """Whether a text ends within a thought.

    >>> thinks_at_end("<think>One and"), thinks_at_end("<think>One</think>Two")
    (True, False)
    """
    return any(text.rfind(opened) > text.rfind(closed) for opened, closed in MARKERS)


def at(messages: Any, path: Path) -> Any:
    """The value at a path."""
    for key in path:
        messages = messages[key]
    return messages


# ---- the texts of messages -------------------------------------------------------------------------------------------


def _pieces(messages: Sequence[Message]) -> Iterator[Piece]:
    for turn, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        for key in THINKING:
            if isinstance(given := message.get(key), str) and given.strip():
                yield Piece((turn, key), 0, len(given), TokenLabel(turn, role, "thinking"))
                break  # the others are synonyms
        if isinstance(content, str):
            yield from _segments((turn, "content"), content, turn, role)
        for i, _ in enumerate(message.get("tool_calls") or ()):
            yield Piece((turn, "tool_calls", i), 0, 0, TokenLabel(turn, role, "call"))


def _segments(path: Path, text: str, turn: int, role: str) -> Iterator[Piece]:
    """The thoughts in a text, between their markers, and the rest."""
    start = 0
    opened, closed = next((pair for pair in MARKERS if pair[1] in text and role == "assistant"), ("", ""))
    if closed:
        thought_from = text.find(opened) + len(opened) if opened in text else 0
        start = text.index(closed, thought_from) + len(closed)
        yield from _unless_blank(Piece(path, 0, thought_from - len(opened), TokenLabel(turn, role, "content")), text)
        yield from _unless_blank(
            Piece(path, thought_from, start - len(closed), TokenLabel(turn, role, "thinking")), text
        )
    yield from _unless_blank(Piece(path, start, len(text), TokenLabel(turn, role, "content")), text)


def _unless_blank(piece: Piece, text: str) -> list[Piece]:
    return [piece] if text[piece.start : piece.stop].strip() else []


# ---- marks -----------------------------------------------------------------------------------------------------------


class _Marks:
    """Words that occur nowhere in a conversation: two for each of its pieces, around it."""

    def __init__(self, text: str, pieces: Sequence[str]) -> None:
        number = 0
        while any(f"zq{number}x" in each for each in (text, *pieces)):
            number += 1
        self._start = f"zq{number}x"
        self._pattern = re.compile(rf"{self._start}(\d+)([ab])z")

    def __call__(self, piece: int, which: str) -> str:
        return f"{self._start}{piece}{which}z"

    def removed_from(self, text: str) -> tuple[str, Places]:
        """The text without marks; of each piece its marks, in order, with their places in that text."""
        places: dict[int, list[tuple[str, int]]] = {}
        removed = 0
        for found in self._pattern.finditer(text):
            places.setdefault(int(found[1]), []).append((found[2], found.start() - removed))
            removed += len(found[0])
        return self._pattern.sub("", text), places


def _outside(text: str, before: str, after: str) -> str:
    return f"{before}{text}{after}"


def _inside(text: str, before: str, after: str) -> str:
    """Within the spaces at both ends, which templates strip."""
    core = text.strip()
    start = text.index(core)
    return f"{text[:start]}{before}{core}{after}{text[start + len(core) :]}"


def _at_the_end(text: str, before: str, after: str) -> str:
    """After the text alone, where a template looks at how the text begins."""
    return f"{text.rstrip()}{after}{text[len(text.rstrip()) :]}"


def _marked(
    messages: Sequence[Message], pieces: Sequence[Piece], numbers: Sequence[int], marks: _Marks, around: Around
) -> list[Any]:
    """The messages with marks around the pieces with these numbers."""
    marked: list[Any] = copy.deepcopy(list(messages))
    for i in reversed(numbers):  # from the back, so that earlier pieces of a string stay in place
        piece = pieces[i]
        before, after = marks(i, "a"), marks(i, "b")
        *path, key = piece.path
        holder = at(marked, tuple(path))
        if piece.label.part == "call" and not isinstance(holder[key], str):
            holder[key] = _marked_call(holder[key], before, after)
            continue
        text = holder[key]
        new = around(text[piece.start : piece.stop], before, after)
        holder[key] = text[: piece.start] + new + text[piece.stop :]
        if key in THINKING:
            holder.update({name: holder[key] for name in THINKING if name in holder})
    return marked


def _marked_call(call: Message, before: str, after: str) -> Any:
    """A call with a mark before the name of the function, and marks after it and after each text of its arguments."""
    holder = call.get("function", call)
    given = holder.get("arguments")
    marked = {**holder, "name": f"{before}{holder['name']}{after}"}
    if isinstance(given, str):
        marked["arguments"] = given + after
    elif given is not None:
        marked["arguments"] = _with_ends(given, after)
    return {**call, "function": marked} if "function" in call else marked


def _with_ends(value: object, mark: str) -> object:
    """Arguments with a mark after each name and each text."""
    if isinstance(value, Mapping):
        return {f"{key}{mark}": _with_ends(each, mark) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_ends(each, mark) for each in value]
    return value + mark if isinstance(value, str) else value


# ---- from marks to spans ---------------------------------------------------------------------------------------------


def _found(
    messages: Sequence[Message], pieces: Sequence[Piece], text: str, places: Places
) -> tuple[tuple[Span, ...], tuple[str, ...]]:
    """The spans in order, and what became of pieces that are not there as they were given."""
    spans: list[Span] = []
    changed = []
    for i, piece in enumerate(pieces):
        label, given = piece.label, piece.text(messages).strip()
        who = f"turn {label.turn} ({label.role})"
        here = places.get(i, ())
        if not here:
            changed.append(f"{who}: its {label.part} was left out by the chat template")
        elif label.part == "call" and not isinstance(at(messages, piece.path), str):
            spans.append(Span(*_call_around(text, here[0][1], here[-1][1]), label))
        else:
            ends = [place for kind, place in here if kind == "b"]
            starts = [place for kind, place in here if kind == "a"] or [end - len(given) for end in ends]
            spans += [Span(start, stop, label) for start, stop in zip(starts, ends, strict=True)]
            written = {text[start:stop].strip() for start, stop in zip(starts, ends, strict=True)}
            if written != {given}:
                changed.append(f"{who}: its {label.part} is written as {min(written)!r}")
    spans.sort()
    for one, other in pairwise(spans):
        if other.start < one.stop:
            raise ValueError(
                f"the roles of this conversation cannot be told at character {other.start} of its text: it is of turn "
                f"{one.label.turn} and of turn {other.label.turn}"
            )
    return tuple(spans), tuple(changed)


def _call_around(text: str, start: int, stop: int) -> tuple[int, int]:
    """A call with the brackets around it, where it is written as one object: from `{` to `}`."""
    line = text.rfind("\n", 0, start) + 1
    if opened := re.search(r'\{\s*(?:"\w+":\s*(?:"\w*",?\s*|\{\s*)?)*"?$', text[line:start]):
        start = line + opened.start()
    depth, quoted, i = 0, False, start
    while i < len(text) and (i < stop or depth > 0):
        char = text[i]
        if char == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (char in OPENERS) - (char in CLOSERS)
        i += 1
    return (start, i) if depth <= 0 else (start, stop)


def label_at(spans: Sequence[Span], place: int) -> TokenLabel | None:
    """The label of the character at a place; None between spans."""
    i = bisect_right(spans, place, key=lambda span: span.start) - 1
    return spans[i].label if i >= 0 and place < spans[i].stop else None
