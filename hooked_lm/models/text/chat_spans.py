"""Finds which characters of a rendered conversation come from which message.

The checkpoint's own template renders the conversation twice: as it is, and with a mark before and after each text of each
message. Without the marks both must be the same string; then a mark in the second gives the exact place of a text in the first,
whatever the template does around it: folding a system message into a user turn, dropping former thoughts, adding a date.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hooked_lm.hooks.token_labels import TokenLabel

Message = Mapping[str, Any]
Path = tuple[Any, ...]  # of keys and indices into the list of messages
Marks = Sequence[
    tuple[str, int]
]  # "a": before a text, "b": after one, "c": before one within a call; and where they are
Places = Mapping[int, Marks]  # of each piece its marks
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
HEADERS = (
    ("<|start|>", "<|message|>"),
    ("<|channel|>", "<|message|>"),
)  # between which a model says what it writes next
OPENERS, CLOSERS = "([{", ")]}"


class Span(NamedTuple):
    """Characters [start, stop) of a rendered conversation, and whose they are."""

    start: int
    stop: int
    label: TokenLabel


class Spans(NamedTuple):
    """A rendered conversation: its text, its spans in order, and what the template left out or wrote differently.

    `missing` is what it left out of that which is no thought.
    """

    text: str
    spans: tuple[Span, ...]
    changed: tuple[str, ...]
    missing: tuple[str, ...]


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

    plain, together = places(range(len(pieces)), _outside)
    found = dict(together) if plain == text else {}
    for i, piece in enumerate(pieces):
        if plain != text:
            found |= _places_of_one(text, piece, [places([i], around) for around in (_outside, _inside, _at_the_end)])
        if found.get(i) and (value := _last_value(messages, piece.path)):
            without = _copied(messages)
            *path, key = value
            at(without, tuple(path))[key] = marks(i, "b")
            found[i] = [*found[i], ("b", _end_of_value(text, piece.label, render(without), marks(i, "b")))]
    return Spans(text, *_found(messages, pieces, text, found))


def _places_of_one(text: str, piece: Piece, tried: Sequence[tuple[str, "Places"]]) -> "Places":
    """The marks of one piece in the first way of marking that changes nothing else; raises ValueError if there is none.

    The last way has a mark at the end alone, so that if there is none, some of the text may be there.
    """
    *both, (_, found_at_end) = tried
    for plain, found in tried if found_at_end else both:
        if plain == text:
            return found
    same = max(_n_equal(plain, text) for plain, _ in both)
    raise ValueError(_untold(text, piece.label, same))


def _untold(text: str, label: TokenLabel, start: int) -> str:
    return (
        f"what is of turn {label.turn} ({label.role}) cannot be told from character {start} of the text on, near "
        f"{text[max(0, start - 30) : start + 30]!r}: the chat template does not simply put in its {label.part}, but writes "
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
    return _ends_within(text, MARKERS)


def is_header_at_end(text: str) -> bool:
    """Whether a text ends within what a model writes before a message, such as the name of its channel."""
    return _ends_within(text, HEADERS)


def _ends_within(text: str, markers: Sequence[tuple[str, str]]) -> bool:
    return any(text.rfind(opened) > text.rfind(closed) for opened, closed in markers)


def at(messages: object, path: Path) -> Any:
    """The value at a path."""
    found: Any = messages
    for key in path:
        found = found[key]
    return found


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
        elif content is not None:
            for i, part in enumerate(content):
                if isinstance(part.get("text"), str):
                    yield from _segments((turn, "content", i, "text"), part["text"], turn, role)
        for i, _ in enumerate(message.get("tool_calls") or ()):
            yield Piece((turn, "tool_calls", i), 0, 0, TokenLabel(turn, role, "call"))


def _segments(path: Path, text: str, turn: int, role: str) -> Iterator[Piece]:
    """The thoughts in a text, between their markers, and the rest. A thought may begin in the prompt, before the text."""
    pairs = [pair for pair in MARKERS if role == "assistant" and any(marker in text for marker in pair)]
    found = list(re.finditer("|".join(map(re.escape, pairs[0])), text)) if pairs else []
    part = "thinking" if found and found[0][0] == pairs[0][1] else "content"
    start = 0
    for marker in found:
        yield from _unless_blank(Piece(path, start, marker.start(), TokenLabel(turn, role, part)), text)
        start, part = marker.end(), "thinking" if marker[0] == pairs[0][0] else "content"
    yield from _unless_blank(Piece(path, start, len(text), TokenLabel(turn, role, part)), text)


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
        self._pattern = re.compile(rf"{self._start}(\d+)([abc])z")

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
    marked = _copied(messages)
    for i in reversed(numbers):  # from the back, so that earlier pieces of a string stay in place
        piece = pieces[i]
        before, after = marks(i, "a"), marks(i, "b")
        *path, key = piece.path
        holder = at(marked, tuple(path))
        if piece.label.part == "call" and not isinstance(holder[key], str):
            holder[key] = _marked_call(holder[key], before, after, marks(i, "c"))
            continue
        text = holder[key]
        new = around(text[piece.start : piece.stop], before, after)
        holder[key] = text[: piece.start] + new + text[piece.stop :]
        if key in THINKING:
            holder.update({name: holder[key] for name in THINKING if name in holder})
    return marked


def _copied(value: object) -> Any:
    """A copy in which nothing occurs twice, as the same message may in a conversation."""
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, (list, tuple)) else value


def _marked_call(call: Message, before: str, after: str, within: str) -> Any:
    """A call with marks around the name of the function, and around the names and the texts of its arguments."""
    holder = call.get("function", call)
    marked = {**holder, "name": f"{before}{holder['name']}{after}"}
    if holder.get("arguments") is not None:
        marked["arguments"] = _with_marks(holder["arguments"], within, after)
    return {**call, "function": marked} if "function" in call else marked


def _with_marks(value: object, before: str, after: str) -> object:
    """Arguments with marks around each name and each text."""
    if isinstance(value, Mapping):
        return {f"{before}{key}{after}": _with_marks(each, before, after) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_marks(each, before, after) for each in value]
    return f"{before}{value}{after}" if isinstance(value, str) else value


def _last_value(messages: Sequence[Message], path: Path) -> Path | None:
    """The path to the last argument of a call, if it is no text, around which there are marks."""
    if path[1] != "tool_calls":
        return None
    path = (*path, "function") if "function" in at(messages, path) else path
    arguments = at(messages, path).get("arguments")
    if not isinstance(arguments, Mapping) or not arguments or isinstance(arguments[(*arguments,)[-1]], str):
        return None
    return (*path, "arguments", (*arguments,)[-1])


def _end_of_value(text: str, label: TokenLabel, marked: str, mark: str) -> int:
    """Where a value ends in a text, if a mark is in its place in another one, which may be in quotes."""
    before, found, after = marked.partition(mark)
    if before[-1:] == after[:1] == '"':
        before, after = before[:-1], after[1:]
    if not found or not text.startswith(before) or not text[len(before) :].endswith(after):
        raise ValueError(_untold(text, label, _n_equal(text, before)))
    return len(text) - len(after)


# ---- from marks to spans ---------------------------------------------------------------------------------------------


def _found(
    messages: Sequence[Message], pieces: Sequence[Piece], text: str, places: Places
) -> tuple[tuple[Span, ...], tuple[str, ...], tuple[str, ...]]:
    """The spans in order, what became of pieces that are not there as they were given, and those left out but thoughts."""
    spans: list[Span] = []
    changed, missing = [], []
    for i, piece in enumerate(pieces):
        label, given = piece.label, piece.text(messages).strip()
        who = f"turn {label.turn} ({label.role})"
        here = places.get(i, ())
        if not here:
            changed.append(f"{who}: its {label.part} was left out by the chat template")
            missing += changed[-1:] if label.part != "thinking" else []
        elif label.part == "call":
            spans += [Span(*each, label) for each in _calls(text, here)]
        else:
            ends = [place for kind, place in here if kind == "b"]
            starts = [place for kind, place in here if kind == "a"] or [end - len(given) for end in ends]
            if here[0][0] == "b" and (wrong := next((end for end in ends if not text[:end].endswith(given)), None)):
                raise ValueError(_untold(text, label, max(0, wrong - len(given))))
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
    return tuple(spans), tuple(changed), tuple(missing)


def _calls(text: str, marks: Marks) -> Iterator[tuple[int, int]]:
    """Where a call is written, with the brackets around it: from its name to its last argument.

    A template that names the function again elsewhere, such as beside the result, does not write the call again.
    """
    written: list[list[tuple[str, int]]] = [[]]
    for kind, place in sorted(marks, key=lambda mark: mark[1]):
        if kind == "a" and any(before == "a" for before, _ in written[-1]):
            written.append([])
        written[-1].append((kind, place))
    most = max(map(len, written))
    whole = [each for each in written if len(each) == most] if most > len("ab") else written[:1]
    yield from (_with_brackets(text, each) for each in whole)


def _with_brackets(text: str, marks: Marks) -> tuple[int, int]:
    """The characters between the first and the last of the marks of a call, and the brackets that enclose them."""
    texts = {i for (kind, start), (_, stop) in pairwise(marks) if kind != "b" for i in range(start, stop)}
    (_, start), (_, last) = marks[0], marks[-1]
    line = text.rfind("\n", 0, start) + 1
    if opened := re.search(r'\{\s*(?:"\w+":\s*(?:"\w*",?\s*|\{\s*)?)*"?$', text[line:start]):
        start = line + opened.start()
    depth, stop = 0, start
    while stop < len(text) and (stop < last or depth > 0 or text[stop] == "("):
        if stop not in texts:
            depth += (text[stop] in OPENERS) - (text[stop] in CLOSERS)
        stop += 1
    return (start, stop) if depth <= 0 else (start, last)


def label_at(spans: Sequence[Span], place: int) -> TokenLabel | None:
    """The label of the character at a place; None between spans."""
    i = bisect_right(spans, place, key=lambda span: span.start) - 1
    return spans[i].label if i >= 0 and place < spans[i].stop else None
