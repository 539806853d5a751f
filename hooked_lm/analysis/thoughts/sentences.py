"""The sentences of a thought, and the tokens that they are."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from hooked_lm.models.text.chat import Chat

CLOSING = r"[\"'\u2019\u201d\u300d\u300f\uff09)\]]*"
END = re.compile(rf"[.!?\u2026]{CLOSING}(?=\s)|[\u3002\uff01\uff1f]+{CLOSING}|(?<=\S)(?=\n)")
MARKS = re.compile(r"\s*[\W\d_]{1,4}\s*")  # a piece without a letter
Split = Callable[[str], Sequence[str]]


class ThoughtSentence(NamedTuple):
    """A sentence of a thought: its text without spaces around it, and its positions from `start` up to, not including, `stop`."""

    text: str
    start: int
    stop: int


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, which together are the text: the space between two is at the beginning of the second.

    A sentence ends with a full stop, a question or exclamation mark (and the quotes or brackets that follow it) before a
    space, with the full-width forms of these, and at the end of a line. A piece of a few marks, such as the number of an item of
    a list, is of the next sentence. Abbreviations are not known: where they are many, give another function as `split=`.

    >>> split_sentences('I take 3.5. "Why?" Wait\\n1. Is it 4?')
    ['I take 3.5.', ' "Why?"', ' Wait', '\\n1. Is it 4?']
    """
    ends = sorted({0, *(match.end() for match in END.finditer(text)), len(text)})
    pieces: list[str] = []
    for start, end in pairwise(ends):
        if pieces and (MARKS.fullmatch(pieces[-1]) or not text[start:end].strip()):
            pieces[-1] += text[start:end]
        else:
            pieces.append(text[start:end])
    return pieces


def sentences_of(chat: Chat, split: Split = split_sentences) -> tuple[ThoughtSentence, ...]:
    """The sentences of the last thought of a conversation. A token belongs to the sentence of its first visible character, and
    a sentence without any token is joined to the one before it.

    Raises ValueError for several conversations, for one without a thought, and if `split` changes the text.
    """
    if len(chat) != 1:
        raise ValueError(f"a thought is of one conversation, got {len(chat)}: give chat[0]")
    positions = _last_run(chat.positions("last_thinking"))
    text, offsets = chat.texts[0], chat.offsets[0]
    first, last = offsets[positions[0]][0], offsets[positions[-1]][1]
    pieces = list(split(text[first:last]))
    if "".join(pieces) != text[first:last] or not all(piece.strip() for piece in pieces):
        raise ValueError(f"split must cut the text of the thought into pieces that are not blank, got {pieces}")
    starts = list(accumulate(map(len, pieces), initial=first))
    owners = [bisect_right(starts, _first_visible(text, *offsets[position])) - 1 for position in positions]
    groups = [(owner, [*own]) for owner, own in groupby(range(len(positions)), key=owners.__getitem__)]
    bounds = [0, *(owner for owner, _ in groups[1:]), len(pieces)]
    return tuple(
        ThoughtSentence("".join(pieces[begin:end]).strip(), positions[own[0]], positions[own[-1]] + 1)
        for (begin, end), (_, own) in zip(pairwise(bounds), groups, strict=True)
    )


def _last_run(positions: Sequence[int]) -> list[int]:
    """The last of them that are adjacent: of several thoughts in a turn the last."""
    return [position for i, position in enumerate(positions) if positions[-1] - position == len(positions) - 1 - i]


def _first_visible(text: str, start: int, stop: int) -> int:
    """The place of a token's first character that is not a space; of a token of spaces, its first character."""
    return next((place for place in range(start, stop) if not text[place].isspace()), start)
