"""Conversations as the prompts of an experiment: positions by meaning become numbers, and hooks know the roles of tokens."""

from collections.abc import Callable, Mapping, MutableMapping
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from hooked_lm.engine.answers import first_words
from hooked_lm.engine.pairs import Pairs, with_chats, with_ids
from hooked_lm.engine.stacks import has_two_stacks
from hooked_lm.hooks.token_labels import Named, is_named, reading
from hooked_lm.models.prefix import Prefix, PrefixedPrompt
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import as_prompts, begins_text, conversations_in
from hooked_lm.models.text.methods import TextMethods

P = ParamSpec("P")
R = TypeVar("R")
PROMPTS = ("prompts", "prompt", "corrupted", "clean", "source_prompts", "source_prompt", "target_prompt")
ANSWERS = ("answers", "wrong_answers")
POSITIONS = ("positions", "source_positions", "target_positions", "keys", "queries")  # arguments that are positions


def reads_chats(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of prompts to take conversations, and positions by what their tokens are.

    Conversations are a `Chat`, or messages, alone or in Pairs. Positions such as "assistant" are replaced by the numbers of
    these positions, and hooks that act at such positions know them. Raises ValueError if no prompt is a conversation, and if the
    conversations have them at different numbers; TypeError for a prefix, and for what follows one.
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
        chats = _with_chats(bound.arguments)
        for name in POSITIONS:
            if is_named(given := bound.arguments.get(name)):
                single = isinstance(wanted.parameters[name].default, int)
                bound.arguments[name] = _numbers(f"{name}={given!r}", given, chats, single)
        if not chats:
            return function(*bound.args, **bound.kwargs)
        first, *others = chats.values()
        alike = all(other.labels == first.labels for other in others)
        alike = alike and not has_two_stacks(bound.arguments["model"])  # positions there are those of either text
        with reading(first.labels if alike else None):
            return function(*bound.args, **bound.kwargs)

    return call


def _with_chats(arguments: MutableMapping[str, Any]) -> dict[str, Chat]:
    """The conversations among the arguments, in which they take the place of their messages. If an answer after them begins a
    text, it is replaced by its ids."""
    model = arguments.get("model")
    for name, given in arguments.items():
        if isinstance(given, Pairs):
            arguments[name] = with_ids(model, with_chats(model, given))
        elif name in PROMPTS and (several := conversations_in(given)) is not None:
            arguments[name] = as_prompts(model, several)
    in_pairs = [pairs for pairs in arguments.values() if isinstance(pairs, Pairs)]
    every = {**arguments, **{name: getattr(pairs, name) for pairs in in_pairs for name in ("corrupted", "clean")}}
    chats = {name: given for name, given in every.items() if isinstance(given, Chat)}
    if chats and isinstance(model, TextMethods) and all(begins_text(chat, model.tokenizer) for chat in chats.values()):
        arguments.update({name: first_words(arguments[name], name, model) for name in ANSWERS if name in arguments})
    return chats


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
