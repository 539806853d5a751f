"""Labels: tokens with visible spaces, positions as their tokens, and axes whose long labels are cut but whole on hover."""

import html
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hooked_lm.viz.theme import FAINT

CONTROLS = {chr(code): chr(0x2400 + code) for code in range(32)}  # ␀, ␛, ...
HALVES = dict.fromkeys(
    map(chr, range(0xD800, 0xE000)), "\N{REPLACEMENT CHARACTER}"
)  # of a character: no file can hold them
VISIBLE = str.maketrans({**CONTROLS, **HALVES, "\n": "↵", "\t": "⇥", "\u00a0": "⍽"})
Who = tuple[int, str, str]  # of a token of a conversation: the turn, the role and the part
POSITION = re.compile(r"(\d+) (.*)", re.DOTALL)  # "10  Mary": a position and its token
SPACES = re.compile("^ +| +$| {2,}")
ROOM = 36  # letters of the longest label of an axis
MOST = 48  # labels that are written along an axis
LETTER = 6.3  # pixels, on average
NARROWEST = 220  # pixels of an axis on a telephone, or in one of many panels


def visible(token: str, longest: int = 16) -> str:
    """A token with visible outer spaces, line breaks and control characters; long tokens are shortened.

    >>> visible(" Mary"), visible("a\\n"), visible("layer 0"), visible("")
    ('·Mary', 'a↵', 'layer 0', '∅')
    """
    shown = SPACES.sub(lambda run: "·" * len(run[0]), token).translate(VISIBLE) or "∅"
    return cut(shown, longest)


def token_label(token: str, longest: int = 16) -> str:
    """A visible token for figures and pages, with markup escaped.

    >>> token_label(" <b>")
    '·&lt;b&gt;'
    """
    return html.escape(visible(token, longest), quote=False)


def who(label: Who) -> str:
    """Whose a token of a conversation is, in words; what a template adds has no turn.

    >>> (
    ...     who((1, "assistant", "thinking")),
    ...     who((0, "user", "content")),
    ...     who((-1, "template", "marker")),
    ... )
    ('1 assistant, thinking', '0 user', 'template')
    """
    turn, role, part = label
    name = role if part in ("content", "marker") else f"{role}, {part}"
    return name if turn < 0 else f"{turn} {name}"


def cut(text: str, longest: int) -> str:
    """A text of at most so many letters, the last of which is an ellipsis if there were more."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def position_labels(labels: Sequence[Any]) -> list[str]:
    """Labels of positions, such as "10  Mary", as tokens; equal tokens keep their positions. Other labels are unchanged.

    >>> position_labels(["0 When", "1  Mary", "2  and", "3  Mary"])
    ['When', ' Mary (1)', ' and', ' Mary (3)']
    >>> position_labels(["3 apples", "2 pears"])
    ['3 apples', '2 pears']
    """
    found = [POSITION.fullmatch(str(label)) for label in labels]
    parts = [(int(match[1]), match[2]) for match in found if match]
    if len(parts) < len(labels) or any(one[0] >= other[0] for one, other in pairwise(parts)):
        return [str(label) for label in labels]
    tokens = Counter(token for _, token in parts)
    return [f"{token} ({place})" if tokens[token] > 1 else token for place, token in parts]


@dataclass(frozen=True)
class Axis:
    """An axis over integers with labels, so that equal labels stay separate.

    `names` are the whole labels, for hover texts, and `turns` say whose the tokens of a conversation are. On the axis labels of
    more than `room` letters are cut, and of more than `most` labels only every second, third, ... is written.
    """

    names: tuple[str, ...]
    title: str
    room: int = ROOM
    most: int = MOST
    turns: tuple[Who | None, ...] = ()

    @classmethod
    def of(
        cls,
        labels: Sequence[Any] | None,
        length: int,
        what: str,
        title: str = "",
        most: int = MOST,
        turns: Sequence[Who | None] | None = None,
    ) -> "Axis":
        """The axis of labels, or of indices if None. Raises ValueError for the wrong number of labels or turns."""
        labels = range(length) if labels is None else labels
        for given, name in ((labels, "labels"), (labels if turns is None else turns, "turns")):
            if len(given) != length:
                raise ValueError(f"{len(given)} {name} for {length} {what}")
        return cls(tuple(visible(str(label), 10_000) for label in labels), title, most=most, turns=tuple(turns or ()))

    @property
    def every(self) -> int:
        """The step from one written label to the next."""
        return max(1, -(-len(self.names) // self.most))

    @property
    def is_whole(self) -> bool:
        """Whether labels are written in full."""
        return self.longest <= self.room

    @property
    def of_several(self) -> str:
        """What the labels are: "positions", "patches"; "columns" without a title."""
        one = self.title.split(" (")[0] or "column"
        return f"{one}es" if one.endswith("ch") else f"{one}s"

    @property
    def longest(self) -> int:
        """The letters of the longest label."""
        return max(map(len, self.names), default=0)

    @property
    def width(self) -> int:
        """Pixels of the labels from left to right."""
        return round(LETTER * min(self.longest, self.room))

    @property
    def is_turned(self) -> bool:
        """Whether the labels of a horizontal axis need to be turned, to fit beside each other where it is narrow."""
        return self.longest > 3 and len(self.names) * (self.width + 8) > NARROWEST

    @property
    def height(self) -> int:
        """Pixels of the labels of a horizontal axis and of its title from top to bottom."""
        labels = 14 + 5 * min(self.longest, self.room) if self.is_turned else 22
        return labels + (32 if self.title else 4)

    @property
    def left(self) -> int:
        """Pixels that the first label of a horizontal axis takes on the left, where it is turned."""
        return max(60, round(0.71 * LETTER * min(len(self.names[0]), self.room)) + 8) if self.names else 60

    def _names_between(self) -> dict[str, str]:
        """The labels that are not written, for hover texts."""
        return {str(i): html.escape(name, quote=False) for i, name in enumerate(self.names) if i % self.every}

    def settings(self, is_horizontal: bool, with_title: bool = True) -> dict[str, Any]:
        """The axis for plotly."""
        title = {"text": html.escape(self.title, quote=False), "font": {"size": 12, "color": FAINT}, "standoff": 10}
        written = range(0, len(self.names), self.every)
        return {
            "tickmode": "array",
            "tickvals": list(written),
            "ticktext": [html.escape(cut(self.names[i], self.room), quote=False) for i in written],
            "labelalias": self._names_between() or None,
            "tickfont": {"size": 11},
            "tickangle": None if is_horizontal else 0,
            "autotickangles": [0, -45] if is_horizontal else None,
            "ticklabelstandoff": 4,
            "title": title if with_title else None,
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
            "automargin": True,
        }
