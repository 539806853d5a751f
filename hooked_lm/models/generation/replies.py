"""Replies: what a model answers in a conversation, as a turn of the assistant."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from itertools import takewhile
from typing import Any

from torch import Tensor

from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.generation_step import run_generation
from hooked_lm.hooks.hook_spec import HookList
from hooked_lm.hooks.token_labels import Labels
from hooked_lm.keywords import check_keywords
from hooked_lm.models.generation.decoder import started
from hooked_lm.models.generation.loop import prompt_sequence
from hooked_lm.models.prefix import (
    Prefix,
    PrefixedPrompt,
    as_prompt,
    changing_hooks,
    depends_on_where_a_prompt_ends,
    versions,
)
from hooked_lm.models.text.chat import Chat, asked_for_answer, continued, in_template, new_text
from hooked_lm.progress import progress_bar

OPTIONS = tuple(signature(started).parameters)[4:]


def reply(
    model: HookedRootModule,
    chat: Chat,
    max_new_tokens: int,
    hooks: HookList,
    prefix: object,
    verbose: bool = True,
    **options: object,
) -> Chat:
    """The conversations with an answer; see `Chat.reply`."""
    check_keywords("reply", options, (*OPTIONS, "verbose"))
    if not isinstance(prefix, Prefix | None):
        raise TypeError(f"prefix must be a Prefix, such as that of the last reply, got a {type(prefix).__name__}")
    others: dict[str, Any] = {**options}
    asked = asked_for_answer(chat, model)
    with model.hooks(hooks):
        active = [hook.user_hook for hook in changing_hooks(model)]
        if prefix is not None:
            prefix.check(model)
        prompt = asked if prefix is None else _after(prefix, asked, active)
        reader, steps = started(model, as_prompt(prompt), max_new_tokens, None, **others)
        is_kept = len(asked) == 1 and not any(map(depends_on_where_a_prompt_ends, active))
        bar = progress_bar("generating", max_new_tokens, None if verbose else False, steps=steps)
        run_generation(lambda: deque(bar, maxlen=0))
    n, labels = asked.shape[1], reader.sequence.labels or []
    written = []
    for row, new in enumerate(reader.sequence.tokens[:, n:].tolist()):
        made = continued(asked[row], new, labels[row][len(labels[row]) - len(new) :], model.tokenizer)
        if not new_text(made, len(new)):
            raise ValueError(
                f"the answer of conversation {row} has no text: {len(new)} tokens, all of them markers or blank"
            )
        written.append(made)
    answered = in_template(chat, [each.messages[0] for each in written], model, add_generation_prompt=False)
    if reader.cache is None or not is_kept:
        return answered
    reader.cache.freeze()
    read = written[0][0, : reader.cache.length]  # the last token was not read
    of_weights = versions(model), model.embed.W_E.dtype
    sequence = prompt_sequence(model, read)
    kept = Prefix(model, read, sequence, reader.cache, None, None, tuple(active), *of_weights)
    return replace(answered, prefix=kept)


def _after(prefix: Prefix, asked: Chat, active: Sequence[object]) -> Chat | PrefixedPrompt:
    """A conversation after as much of a prefix as it begins with; all of it if layers have states of the whole prefix alone."""
    if len(asked) != 1 or prefix.n_rows != 1:
        raise ValueError(f"a prefix is of one conversation, got {prefix.n_rows} rows for {len(asked)} conversations")
    for hook in prefix.hooks:
        if all(hook is not one for one in active):
            raise ValueError(
                f"this prefix was computed under {hook!r}, which is not active: reply under the same hooks, or without prefix"
            )
    read, new = (
        _what_counts(*each, bool(prefix.hooks))
        for each in ((prefix.tokens, prefix.sequence.labels), (asked.tokens, asked.labels))
    )
    n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(read, new, strict=False)))
    n = min(n, asked.shape[1] - 1)
    if n == 0 or (prefix.keys_values.states and n < prefix.n_pos):
        return asked
    return prefix.first(n).then(asked[0, n:])


def _what_counts(tokens: Tensor, labels: Sequence[Labels] | None, is_hooked: bool) -> list[object]:
    """The token ids of a row, with what they are if hooks may have acted by that."""
    ids = tokens[0].tolist()
    return [*zip(ids, labels[0], strict=True)] if is_hooked and labels is not None else ids
