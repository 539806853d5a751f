"""The sentences of a thought, and the tokens that they are."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from hooked_lm.models.text.chat import Chat

END = re.compile(r"[.!?\u2026][\"'\u2019\u201d)\]]*(?=\s)|[\u3002\uff01\uff1f]|(?<=\S)(?=\n)")
Split = Callable[[str], Sequence[str]]


class ThoughtSentence(NamedTuple):
    """A sentence of a thought: its text without spaces around it, and its positions from `start` up to, not including, `stop`."""

    text: str
    start: int
    stop: int


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, which together are the text: the space between two is at the beginning of the second.

    A sentence ends with a full stop, a question or exclamation mark (and the quotes or brackets that follow it) before a
    space, with the full-width forms of these, and at the end of a line.

    >>> split_sentences('I take 3.5. "Why?" Wait\\nIs it 4?')
    ['I take 3.5.', ' "Why?"', ' Wait', '\\nIs it 4?']
    """
    ends = sorted({match.end() for match in END.finditer(text)})
    starts = [0, *(end for end in ends if text[end:].strip())]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True) if start < end]


def sentences_of(chat: Chat, split: Split = split_sentences) -> tuple[ThoughtSentence, ...]:
    """The sentences of the last thought of a conversation. A token belongs to the sentence of its first visible character.

    Raises ValueError for several conversations, for one without a thought, and if `split` changes the text.
    """
    if len(chat) != 1:
        raise ValueError(f"a thought is of one conversation, got {len(chat)}: give chat[0]")
    positions = chat.positions("last_thinking")
    text, offsets = chat.texts[0], chat.offsets[0]
    first, last = offsets[positions[0]][0], offsets[positions[-1]][1]
    pieces = list(split(text[first:last]))
    if "".join(pieces) != text[first:last] or not all(piece.strip() for piece in pieces):
        raise ValueError(f"split must cut the text of the thought into pieces that are not blank, got {pieces}")
    starts = list(accumulate(map(len, pieces), initial=first))[:-1]
    owners = [bisect_right(starts, _first_visible(text, *offsets[position])) - 1 for position in positions]
    found = []
    for i, piece in enumerate(pieces):
        own = [position for position, owner in zip(positions, owners, strict=True) if owner == i]
        if not own:
            raise ValueError(
                f"the sentence {piece.strip()!r} has no token of its own: split the text into longer pieces"
            )
        found.append(ThoughtSentence(piece.strip(), own[0], own[-1] + 1))
    return tuple(found)


def _first_visible(text: str, start: int, stop: int) -> int:
    """The place of a token's first character that is not a space; of a token of spaces, its first character."""
    return next((place for place in range(start, stop) if not text[place].isspace()), start)
