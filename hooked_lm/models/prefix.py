"""Prefix: the beginning of prompts, which a decoder reads once."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.generation_step import GenerationStep, current, set_current
from hooked_lm.hooks.hook import Hook
from hooked_lm.hooks.indices import plain_indices
from hooked_lm.hooks.own_run import OwnRun
from hooked_lm.hooks.token_labels import PADDING, Labels, is_named, select_positions, turns_of
from hooked_lm.models.checks import check_in_parts
from hooked_lm.models.generation.loop import Input, TokenSequence, prompt_sequence
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.vision.inputs import VisionInputs
from hooked_lm.models.weights.weight_scope import open_scopes

Version = tuple[Callable[[], object], int, int]  # of a weight: the tensor, its edits, where its values are
SETTLED = ("input_ids", "tokens", "start_at_layer", "prepend_bos", "padding_side", "attention_mask", "past_kv_cache")


@dataclass(frozen=True, eq=False)
class Prefix(OwnRun):
    """The beginning of prompts with what the model computed of it; see `model.prefix`. Nothing changes it.

    Attributes:
        prompt: the prompt as it was given.
        sequence: its token ids, padded on the left, and their mask.
        keys_values: the frozen keys, values and states of all layers.
        logits: those of the next token; None for the beginning of a longer prefix.
        cache: the activations that were asked for; None if none were.
        hooks: the hook objects that were active, other than those that only record.
    """

    model: HookedRootModule
    prompt: object
    sequence: TokenSequence
    keys_values: KeyValueCache
    logits: Float[Tensor, "batch d_vocab"] | None
    cache: Any
    hooks: tuple[object, ...]
    versions: dict[str, Version]
    dtype: torch.dtype

    @property
    def tokens(self) -> Int[Tensor, "batch pos"]:
        """The token ids."""
        return self.sequence.tokens

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return len(self.sequence.real)

    @property
    def n_pos(self) -> int:
        """The number of positions."""
        return len(self.sequence)

    def __add__(self, new: Input) -> "PrefixedPrompt":
        """The prompt that continues this prefix by text, several texts, or token ids [batch, new] or [new]; see `then`."""
        return self.then(new)

    def then(self, new: Input, attention_mask: Tensor | None = None) -> "PrefixedPrompt":
        """`prefix + new`, where the mask says which of the new ids are real.

        Text is tokenized by itself, without BOS. Rows of different lengths are padded on the left, between the prefix and them.
        A prefix of one row continues in any number of rows, one of several rows in as many, or all alike. After a conversation
        text is of the assistant, and what follows of a longer conversation is `chat[:, n:]`.

        Raises ValueError for nothing new, for images, for other numbers of rows, and for another conversation.
        """
        after = prompt_sequence(self.model, new, False, "left" if attention_mask is None else None, attention_mask)
        if after.images or after.embeds is not None:
            raise ValueError(
                "after a prefix come text or token ids: images and embeddings belong into the prefix itself"
            )
        if isinstance(new, Chat) and self.sequence.growing is not None:
            _check_follows(self, new)
        return PrefixedPrompt(self, after, new)

    def first(self, n: int) -> "Prefix":
        """The prefix of the first `n` tokens of one row, of which nothing is computed: `prefix.first(n) + text`.

        Raises ValueError for several rows, images and embeddings, states of mixers, and rotary angles of the whole length.
        """
        if not 0 < n <= self.n_pos or self.n_rows != 1 or self.sequence.embeds is not None or self.sequence.images:
            raise ValueError(
                f"the first n tokens are those of one row of text: n is 1 to {self.n_pos}, got n={n} of {self!r}"
            )
        if n == self.n_pos:
            return self
        check_in_parts(self.model, n, self.n_pos)
        prompt: Any = self.prompt[0, :n] if isinstance(self.prompt, Chat) else self.tokens[:, :n]
        if self.sequence.growing is not None and not isinstance(prompt, Chat):
            raise ValueError("this prefix of a conversation has grown: give n tokens of the one that it began with")
        sequence = prompt_sequence(self.model, prompt, attention_mask=torch.ones_like(self.tokens[:, :n]))
        kept = self.keys_values.first(n)
        return replace(self, prompt=prompt, sequence=sequence, keys_values=kept, logits=None, cache=None)

    def repeated(self, n: int) -> "PrefixedPrompt":
        """The prompt of `n` rows that each are this prefix of one row, for `generate`: so many samples share it."""
        if self.logits is None:
            raise ValueError(
                "the next token after the beginning of a prefix is unknown: add what follows, at least a token"
            )
        is_text = isinstance(self.prompt, str)
        return PrefixedPrompt(
            self, TokenSequence(self.tokens.new_empty(n, 0)), [self.prompt] if is_text and n > 1 else self.prompt
        )

    def run(self, model: HookedRootModule, forward: Callable[..., Any], *args: object, **options: object) -> Any:
        """Raises ValueError: nothing follows the prefix."""
        return self.repeated(self.n_rows).run(model, forward)

    def check(self, model: HookedRootModule) -> None:
        """Raises ValueError unless the model is the one that read this prefix, with the same weights."""
        again = "; compute it again with model.prefix(...)"
        if model is not self.model:
            raise ValueError(f"this prefix was computed by another model, of which this one may be a copy{again}")
        weight = model.embed.W_E
        now_and_then = (("dtype", self.dtype, weight.dtype), ("device", self.tokens.device, weight.device))
        for what, was, now in now_and_then:
            if was != now:
                raise ValueError(f"this prefix was computed with {what} {was}, and the model now has {now}{again}")
        then, now = self.versions, versions(model)
        if changed := [name for name in {**then, **now} if not _is_same(then.get(name), now.get(name))]:
            more = f", and {len(changed) - 1} others" if len(changed) > 1 else ""
            raise ValueError(f"'{changed[0]}'{more} changed after this prefix was computed{again}")

    def __repr__(self) -> str:
        under = f", under {', '.join(map(repr, self.hooks))}" if self.hooks else ""
        return f"Prefix({self.n_rows} x {self.n_pos} tokens{under})"


class PrefixedPrompt(OwnRun):
    """A prefix and what follows it: `prefix + text`. The model computes the new positions only.

    `model(...)` gives logits, and `run_with_cache` a cache, of the new positions [batch, new]; hooks see these, and
    `hook.positions` count from the beginning of the prefix. `generate` returns the prefix, too.
    """

    def __init__(self, prefix: Prefix, new: TokenSequence, given: object) -> None:
        sizes = {prefix.n_rows, len(new.real)} - {1}
        if len(sizes) > 1 or 0 in sizes:
            raise ValueError(
                f"the prefix has {prefix.n_rows} rows, and {len(new.real)} are to follow: give one, or as many"
            )
        self.prefix, self.given, self.n_rows, self.n_new = prefix, given, max(sizes, default=1), len(new)
        self._new = TokenSequence(new.tokens.expand(self.n_rows, -1), new.real.expand(self.n_rows, -1))

    @property
    def tokens(self) -> Int[Tensor, "batch new"]:
        """The new token ids, padded on the left."""
        return self._new.tokens

    @property
    def attention_mask(self) -> Int[Tensor, "batch new"]:
        """1 for the new tokens that are real, 0 for padding."""
        return self._new.real.long()

    @property
    def labels(self) -> Sequence[Labels] | None:
        """What the new tokens of each row are, for each column, after a prefix of a conversation."""
        growing = self._sequence().labels
        if growing is None:
            return None
        new = zip(growing, self._new.real.sum(1).tolist(), strict=True)
        return [[PADDING] * (self.n_new - n) + [*row[len(row) - n :]] for row, n in new]

    def opened(self, n_later: int = 0) -> tuple[TokenSequence, KeyValueCache, Float[Tensor, "batch d_vocab"] | None]:
        """All tokens, which so many are to follow; a cache with those of the prefix, and the logits after it."""
        sequence, n = self._sequence(), self.n_rows
        cache = self.prefix.keys_values.continued(n, len(sequence) + n_later)
        logits = self.prefix.logits
        return sequence, cache, None if logits is None else logits.expand(n, -1)

    def _sequence(self) -> TokenSequence:
        """The tokens of the prefix and the new ones."""
        old, n = self.prefix.sequence, self.n_rows
        parts = (x if x is None else x.expand(n, *x.shape[1:]) for x in (old.embeds, old.is_image, old.is_suffix))
        embeds, is_image, is_suffix = parts
        tokens = torch.cat([old.tokens.expand(n, -1), self._new.tokens], 1)
        real = torch.cat([old.real.expand(n, -1), self._new.real], 1)
        sequence = TokenSequence(tokens, real, embeds, old.images, is_image, is_suffix)
        if old.growing is not None:
            growing = old.growing.repeated(n)
            sequence.growing = growing.then(self.given) if self.n_new and isinstance(self.given, Chat) else growing
        return sequence

    def check(self, model: HookedRootModule, options: Mapping[str, object], n_later: int | None = None) -> None:
        """Raises ValueError if the run would differ from one that reads the prefix again.

        `n_later` is the number of tokens to generate; `options` may not have those that the prompt settles.
        """
        self.prefix.check(model)
        check_in_parts(model, self.prefix.n_pos, self.prefix.n_pos + self.n_new)
        if given := [name for name, value in options.items() if name in SETTLED and value is not None]:
            fix = "give it to prefix.then(ids, attention_mask=...)" if "attention_mask" in given else "omit it"
            raise ValueError(f"{given[0]} is settled by the prefix and what was added to it: {fix}")
        if n_later is None and self.n_new == 0:
            raise ValueError("nothing follows the prefix: run model(prefix + text), or generate from it")
        n_prefix = self.prefix.sequence.real.sum(1)
        labels: Sequence[Labels | None] = self._sequence().labels or [None] * self.n_rows
        rows = [
            *zip(
                n_prefix.expand(self.n_rows).tolist(), (n_prefix + self._new.real.sum(1)).tolist(), labels, strict=True
            )
        ]
        for hook in changing_hooks(model):
            if all(hook.user_hook is not one for one in self.prefix.hooks):
                for first, n_prompt, of_row in rows:
                    _check_positions(hook, first, n_prompt, n_prompt + (n_later or 0), of_row)

    def run(self, model: HookedRootModule, forward: Callable[..., Any], *args: object, **options: object) -> Any:
        """The output of a forward pass over the new tokens."""
        self.check(model, options)
        (sequence, keys_values, _), before = self.opened(), current()
        keys_values.freeze()
        set_current(GenerationStep(0, sequence.real, self.n_new, keys_values, sequence.labels))
        try:
            new, others = sequence.columns(self.prefix.n_pos, len(sequence)), {**options}
            others |= {"attention_mask": sequence.real.cpu().long(), "past_kv_cache": keys_values}
            return forward(new, *args, **others)
        finally:
            set_current(before)


Prompt = Input | Prefix | PrefixedPrompt


def as_prompt(input: Prompt) -> Input | PrefixedPrompt:
    """The input of a generation; a prefix is a prompt that nothing follows."""
    return input.repeated(input.n_rows) if isinstance(input, Prefix) else input


def opened(
    model: HookedRootModule, input: Input | PrefixedPrompt, n_later: int | None, how: Mapping[str, Any]
) -> tuple[TokenSequence, KeyValueCache, Float[Tensor, "batch d_vocab"] | None]:
    """A prompt that so many tokens are to follow: its tokens, a cache with those that were read, and the logits after these."""
    if isinstance(input, PrefixedPrompt):
        input.check(model, how, n_later)
        return input.opened(n_later or 0)
    sequence = prompt_sequence(model, input, **how)
    return sequence, KeyValueCache(model.cfg.n_layers, room=len(sequence) + (n_later or 0)), None


def text_of(input: object) -> Any:
    """What an input was given as, without its images."""
    while isinstance(input, PrefixedPrompt):  # also after a prefix that grew
        input = input.given
    return input.tokens if isinstance(input, VisionInputs | Chat) else input


# ---- what a prefix depends on ----------------------------------------------------------------------------------------


def versions(model: torch.nn.Module) -> dict[str, Version]:
    """What changes with each weight: the tensor, the number of its edits, and where its values are; and open adapters.

    PyTorch does not count edits in place of `weight.data`.
    """
    adapters: dict[str, Version] = {
        scope.name + " inside of another" * place: (weakref.ref(scope), scope.n_edits, 0)
        for place, scope in enumerate(open_scopes(model))
    }
    with torch._C.DisableTorchFunctionSubclass():  # of weights that are computed at access
        return adapters | {
            name: (
                weakref.ref(weight),
                0 if weight.is_inference() else weight._version,
                weight.data_ptr() if type(weight) is nn.Parameter else 0,
            )
            for name, weight in model.named_parameters()
        }


def _is_same(then: Version | None, now: Version | None) -> bool:
    return then is not None and now is not None and then[0]() is now[0]() and then[1:] == now[1:]


def changing_hooks(model: HookedRootModule) -> Iterator[Hook]:
    """The active hook objects that may change values; what a function does is not known."""
    for hook in (hook for hooks in model.list_hooks().values() for hook in hooks):
        if hasattr(hook.user_hook, "hook_point") and not hook.records and getattr(hook.user_hook, "is_enabled", True):
            yield hook


def check_hooks_of_prefix(model: HookedRootModule) -> None:
    """Raises ValueError for an active hook that counts positions from the end of the prompt, which is not known yet."""
    for hook in changing_hooks(model):
        given = getattr(hook.user_hook, "positions", None)
        if _counts_from_the_end(given):
            raise ValueError(
                f"{hook.user_hook!r} at '{hook.point.name}' counts from the end of the prompt, which a prefix does not have: "
                "give positions from the beginning, or open the hook after the prefix is computed"
            )


def depends_on_where_a_prompt_ends(hook: object) -> bool:
    """Whether a hook object acts elsewhere in a longer prompt that begins with this one and what was generated."""
    given = getattr(hook, "positions", None)
    return _counts_from_the_end(given) or (isinstance(given, str) and given in ("prompt", "generated"))


def _counts_from_the_end(given: object) -> bool:
    """Whether positions count from the end of a prompt."""
    if not is_named(given):
        return given == "last_prompt" if isinstance(given, str) else any(bound < 0 for bound in _numbers(given))
    if isinstance(given, Mapping):
        return any(turn < 0 for turn in turns_of(given))
    return given.startswith("last_") if isinstance(given, str) else given[1] < 0 or given[0].startswith("last_")


def _numbers(given: object) -> list[int]:
    """The numbers in positions, of a slice its bounds; none in those with another meaning."""
    try:
        plain = plain_indices("positions", given)
    except TypeError:
        return []
    numbers = (plain.start, plain.stop) if isinstance(plain, slice) else plain if isinstance(plain, list) else (plain,)
    return [number for number in numbers if number is not None]


def _check_follows(prefix: Prefix, new: Chat) -> None:
    """Raises ValueError unless a cut conversation goes on where that of the prefix ends."""
    if new.n_before != prefix.n_pos:
        raise ValueError(
            f"a conversation that begins at its token {new.n_before} cannot follow a prefix of {prefix.n_pos} tokens: give what "
            f"comes after these, chat[:, {prefix.n_pos}:]"
        )
    if isinstance(prefix.prompt, Chat) and any(not new.texts[0].startswith(text) for text in prefix.prompt.texts):
        raise ValueError(
            "the prefix is not the beginning of this conversation, which the template may have changed: see chat.n_common(...)"
        )


def _check_positions(hook: Hook, first: int, n_prompt: int, last: int, labels: Labels | None) -> None:
    """Raises ValueError for a hook that acts on other positions than those from `first` to `last`."""
    given = getattr(hook.user_hook, "positions", None)
    if is_named(given):
        reached = [first] if labels is None else select_positions(labels, given, n_prompt)
    elif isinstance(given, slice):
        reached = [*range(n_prompt)[given]]
    elif isinstance(given, str):
        reached = {"generated": [], "last_prompt": [n_prompt - 1]}.get(given, [0])
    else:
        reached = [i + n_prompt if i < 0 else i for i in _numbers(given)] or [0]
    if any(not first <= position < last for position in reached):
        raise ValueError(
            f"{hook.user_hook!r} at '{hook.point.name}': positions {first} to {last - 1} follow the prefix, and this hook "
            "changes others: give positions among them, or compute the prefix inside of the same `with model.hooks(...)`"
        )
