"""Positions by meaning: what each token of a conversation is, and which tokens a name such as "assistant" selects."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from typing import Any, NamedTuple, TypeGuard

ROLES = ("system", "developer", "user", "assistant", "tool", "template")
PARTS = ("content", "thinking", "call", "image", "marker")
KEYS = ("turn", "role", "part")
FIRST_OR_LAST = ("first_", "last_")


class TokenLabel(NamedTuple):
    """What a token of a conversation is: the index of its message, whose it is, and which part of the message.

    What a template adds around the messages has turn -1, role "template" and part "marker".
    """

    turn: int
    role: str
    part: str


TEMPLATE = TokenLabel(-1, "template", "marker")
PADDING = TokenLabel(-1, "padding", "padding")
Labels = Sequence[TokenLabel]  # of the tokens of one row
Named = str | tuple[str, int] | Mapping[str, Any]  # positions by what tokens are


def is_named(given: object) -> TypeGuard[Named]:
    """Whether positions are given by what tokens are, and not by numbers.

    >>> (
    ...     is_named("last_user"),
    ...     is_named(("assistant", -1)),
    ...     is_named({"turn": 3}),
    ...     is_named((0, -1)),
    ...     is_named("all"),
    ... )
    (True, True, True, False, False)
    """
    if isinstance(given, (tuple, list)):
        return bool(given) and isinstance(given[0], str)
    return isinstance(given, Mapping) or (isinstance(given, str) and _name(given) in (*ROLES, *PARTS))


def check_named(given: Named) -> None:
    """Raises ValueError unless `is_named` positions are well formed: a name, `(name, index)`, or a dict of `KEYS`."""
    if isinstance(given, (tuple, list)):
        if len(given) != 2 or not is_named(given[0]) or not isinstance(given[0], str) or type(given[1]) is not int:
            raise ValueError(f"positions={given!r}: expected (name, index), such as ('assistant', -1); {_names()}")
    elif isinstance(given, Mapping):
        if not given or given.keys() - {*KEYS}:
            raise ValueError(f"positions={given!r}: a dict has some of the keys {', '.join(KEYS)}")
        if wrong := [turn for turn in turns_of(given) if type(turn) is not int]:
            raise ValueError(f"positions={given!r}: a turn is the index of a message, got {wrong[0]!r}")
        if given.get("part", "content") not in PARTS:
            raise ValueError(f"positions={given!r}: parts are {', '.join(PARTS)}")


def select_positions(labels: Labels, given: Named, n_prompt: int | None = None) -> list[int]:
    """The positions of the tokens that named positions select, in order.

    A role or a part selects all its tokens; "last_user" those of the last turn of that role; `("assistant", -1)` the last token
    of each turn of the assistant; `{"turn": -1, "part": "content"}` the tokens for which all of this holds, where a negative
    turn counts from the last message. Raises ValueError if there is no such token, IndexError for an index beyond a turn.

    In generation `n_prompt` tokens are of the prompt. "last_", indices and negative turns then count in the prompt alone, so
    that they mean the same at every step, and nothing is raised for what the assistant may write later.

    >>> user, answer = (
    ...     TokenLabel(0, "user", "content"),
    ...     TokenLabel(1, "assistant", "content"),
    ... )
    >>> labels = [TEMPLATE, user, user, TEMPLATE, answer, TokenLabel(2, "user", "content")]
    >>> (
    ...     select_positions(labels, "user"),
    ...     select_positions(labels, "last_user"),
    ...     select_positions(labels, ("user", -1)),
    ... )
    ([1, 2, 5], [5], [2, 5])
    """
    check_named(given)
    prompt = labels[:n_prompt]
    if isinstance(given, (tuple, list)):
        name, index = given
        return _of_each_turn(prompt, name, index)
    found = _fitting(labels, given, prompt)
    if not found and (n_prompt is None or not _may_be_written(given)):
        raise ValueError(f"positions={given!r} selects no token: this conversation has {_described(labels)}")
    return found


def token_groups(labels: Labels, by: str) -> dict[str, list[int]]:
    """The positions of each turn, role or part, by its name: "0 user", and "template" for what the template adds.

    Raises ValueError for another `by`.

    >>> user, answer = (
    ...     TokenLabel(0, "user", "content"),
    ...     TokenLabel(1, "assistant", "thinking"),
    ... )
    >>> token_groups([TEMPLATE, user, TEMPLATE, answer], "turn")
    {'template': [0, 2], '0 user': [1], '1 assistant': [3]}
    """
    if by not in KEYS:
        raise ValueError(f"by must be one of {', '.join(map(repr, KEYS))}, got {by!r}")
    found: dict[str, list[int]] = {}
    for position, label in enumerate(labels):
        if label != PADDING:
            found.setdefault(group_name(label, by), []).append(position)
    return found


def group_name(label: TokenLabel, by: str) -> str:
    """The name of the turn, role or part of a token."""
    turn = f"{label.turn} {label.role}" if label.turn >= 0 else label.role
    return turn if by == "turn" else str(getattr(label, by))


def common_label(labels: Labels) -> TokenLabel:
    """What several tokens have in common; turn -1, and role or part "all", where they differ.

    >>> common_label(
    ...     [TokenLabel(1, "assistant", "thinking"), TokenLabel(1, "assistant", "content")]
    ... )
    TokenLabel(turn=1, role='assistant', part='all')
    """
    turns, roles, parts = ({*each} for each in zip(*labels, strict=True))
    turn, role, part = (next(iter(of)) if len(of) == 1 else None for of in (turns, roles, parts))
    return TokenLabel(-1 if turn is None else turn, role or "all", part or "all")


def _fitting(labels: Labels, given: str | Mapping[str, Any], prompt: Labels) -> list[int]:
    """The positions of a name, or of a dict; turns are counted in the prompt."""
    if isinstance(given, str):
        name = _name(given)
        found = [position for position, label in enumerate(labels) if name in (label.role, label.part)]
        if given == name:
            return found
        turns = [label.turn for label in prompt if name in (label.role, label.part)]
        wanted = (max if given.startswith("last_") else min)(turns, default=None)
        return [position for position in found if labels[position].turn == wanted]
    n_turns = 1 + max((label.turn for label in prompt), default=-1)
    chosen = {turn + n_turns if turn < 0 else turn for turn in turns_of(given)}
    return [
        position
        for position, (turn, role, part) in enumerate(labels)
        if ("turn" not in given or turn in chosen)
        and given.get("role", role) == role
        and given.get("part", part) == part
    ]


def turns_of(given: Mapping[str, Any]) -> Sequence[Any]:
    """The turns that a dict of positions names."""
    turn = given.get("turn", ())
    return turn if isinstance(turn, (list, tuple)) else [turn]


def _may_be_written(given: str | Mapping[str, Any]) -> bool:
    """Whether a model may write such tokens, as the assistant."""
    if isinstance(given, str):
        return _name(given) in ("assistant", *PARTS)
    return given.get("role", "assistant") == "assistant" and all(turn >= 0 for turn in turns_of(given))


def _of_each_turn(labels: Labels, name: str, index: int) -> list[int]:
    """The token at this index of each turn, or of each stretch of the template."""
    found = []
    chosen = set(select_positions(labels, name))
    for turn, several in groupby(enumerate(labels), key=lambda each: each[1].turn):
        here = [position for position, _ in several if position in chosen]
        if here:
            if not -len(here) <= index < len(here):
                raise IndexError(f"positions={(name, index)!r}: turn {turn} has {len(here)} such tokens")
            found.append(here[index])
    return found


def _name(given: str) -> str:
    for prefix in FIRST_OR_LAST:
        given = given.removeprefix(prefix)
    return given


def _names() -> str:
    return f"names are {', '.join((*ROLES, *PARTS))}, each also with 'first_' or 'last_'"


def _described(labels: Labels) -> str:
    """The turns of a conversation in words."""
    kept = dict.fromkeys((label.turn, label.role) for label in labels if label.turn >= 0)
    parts = sorted({label.part for label in labels} - {"padding"})
    return f"{', '.join(f'{turn} {role}' for turn, role in kept) or 'no turns'}, with the parts {', '.join(parts)}"


# ---- the conversation that is read now -------------------------------------------------------------------------------

_now: ContextVar[Sequence[Labels] | None] = ContextVar("token_labels", default=None)


def current() -> Sequence[Labels] | None:
    """The labels of the rows that a model reads now, in this thread or task; None for prompts without roles."""
    return _now.get()


@contextmanager
def reading(labels: Sequence[Labels] | None) -> Iterator[None]:
    """A block in which hook points know what the tokens are."""
    token = _now.set(labels)
    try:
        yield
    finally:
        _now.reset(token)
