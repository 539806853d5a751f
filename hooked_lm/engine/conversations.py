"""Conversations as the prompts of an experiment: positions by meaning become numbers, and hooks know the roles of tokens."""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from hooked_lm.hooks.token_labels import PADDING, Named, is_named, reading
from hooked_lm.models.prefix import Prefix, PrefixedPrompt
from hooked_lm.models.text.chat import Chat

P = ParamSpec("P")
R = TypeVar("R")
POSITIONS = ("positions", "source_positions", "target_positions", "keys", "queries")  # arguments that are positions


def reads_chats(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of prompts to take conversations, and positions by what their tokens are.

    Positions such as "assistant" are replaced by the numbers of these positions, and hooks that act at such positions know
    them. Raises ValueError if no prompt is a conversation, and if the conversations have them at different numbers; TypeError
    for a prefix, and for what follows one.
    """
    wanted = signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = wanted.bind(*args, **kwargs)
        if after := [name for name, given in bound.arguments.items() if isinstance(given, Prefix | PrefixedPrompt)]:
            raise TypeError(
                f"{after[0]} of {function.__name__} may not be a prefix, nor what follows one, which are for model(...), "
                "run_with_cache, run_with_hooks, generate and rollouts: give the whole prompts"
            )
        chats = {name: given for name, given in bound.arguments.items() if isinstance(given, Chat)}
        for name in POSITIONS:
            if is_named(given := bound.arguments.get(name)):
                single = isinstance(wanted.parameters[name].default, int)
                bound.arguments[name] = _numbers(f"{name}={given!r}", given, chats, single)
        if not chats:
            return function(*bound.args, **bound.kwargs)
        first, *others = chats.values()
        alike = all(other.labels == first.labels for other in others)
        with reading(first.labels if alike else None):
            return function(*bound.args, **bound.kwargs)

    return call


def _numbers(what: str, given: Named, chats: Mapping[str, Chat], single: bool) -> int | list[int]:
    """The positions that all conversations have there; one number for a function of one position."""
    if not chats:
        raise ValueError(f"{what}: no prompt has roles; give model.chat(messages), or numbers")
    each = {
        tuple(chat.positions(given, row)): f"conversation {row} of {name}"
        for name, chat in chats.items()
        for row in range(len(chat))
    }
    (positions, first), *others = each.items()
    if others:
        (other, second) = others[0]
        raise ValueError(
            f"{what} are {list(positions)} in {first} and {list(other)} in {second}: they must be the same positions in all, "
            "so give numbers, or one conversation at a time"
        )
    if single and len(positions) > 1:
        raise ValueError(f"{what} are {len(positions)} positions, and one is needed: give the last as ({given!r}, -1)")
    return positions[0] if single else list(positions)


def ids_of_equal_length(chat: Chat, name: str) -> Any:
    """The token ids; ValueError if some conversations are longer than others."""
    lengths = [sum(label != PADDING for label in row) for row in chat.labels]
    if len(set(lengths)) != 1:
        raise ValueError(f"all {name} must have the same number of tokens; these conversations have {lengths}")
    return chat.tokens
