"""Pairs of clean and corrupted prompts: given as one value, and resolved to what a model reads in both runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from hooked_lm.engine import metrics
from hooked_lm.engine.answers import NEST, Answers, first_words
from hooked_lm.engine.prompts import Prompts, check_direction, kind_of, rows_of
from hooked_lm.engine.stacks import Target, has_two_stacks, joined
from hooked_lm.engine.study import Metrics
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import as_prompts, begins_text, conversations_in, transcript
from hooked_lm.models.text.methods import TextMethods
from hooked_lm.models.vision.inputs import ImagesAndTexts, PromptRows, Rows, VisionInputs, ids_of
from hooked_lm.notebook_repr import NotebookRepr, short_repr
from hooked_lm.results import stored

FORMAT = "hooked_lm.Pairs"
MOST_LETTERS = 60  # of a prompt in a line
NO_METRIC = (
    'metric is missing: give metric=..., or the right and the wrong next token, as answers=(" Mary", " John"), or Pairs with '
    "answers and wrong_answers"
)
Own = TypeVar("Own", bound="Pairs")
M = TypeVar("M")
RightAndWrong = tuple[Answers, Answers]  # each as for `metrics.logit_difference`


@dataclass(frozen=True, eq=False, repr=False)
class Pairs(NotebookRepr):
    """Clean and corrupted prompts, pair by pair, with the right and the wrong next tokens.

    Functions of `corrupted` and `clean` prompts take it in place of both: `sweep(model, pairs)` is that of these prompts with
    the logit difference of these answers as `metric`. A metric that is given is used instead. In functions that need no metric,
    as those of circuits, pairs without answers have their default.

    Args:
        clean, corrupted: texts or ids [batch, pos]; one text or [pos] is one pair. Conversations as a `Chat`, or as messages: a
            list of lists, or of mappings with "messages" and options of the template. A model reads messages up to where the
            assistant answers. `VisionInputs` for a model that reads images.
        answers, wrong_answers: as for `metrics.logit_difference`: a string or an id for all pairs; a list or a tensor [batch],
            with one for each pair; nested for several of each pair.

    `len` is the number of pairs; `pairs[:8]`, `pairs[[0, 2]]` and `pairs[0]` are some of them, as Pairs, and a loop goes through
    Pairs of one. Raises ValueError for other numbers of prompts or answers than pairs, and for wrong answers alone.

    >>> from hooked_lm import HookedTransformer, Pairs, patching
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> pairs = Pairs(
    ...     clean=["When Mary and John left, John", "When Tom and Alice left, Alice"],
    ...     corrupted=["When Mary and John left, Mary", "When Tom and Alice left, Tom"],
    ...     answers=[" Mary", " Tom"],
    ...     wrong_answers=[" John", " Alice"],
    ... )
    >>> pairs[1:]
    Pairs(1 pair: clean 'When Tom and Alice left, Alice', corrupted 'When Tom and Alice left, Tom', answer ' Tom', not ' Alice')
    >>> result = patching.sweep(model, pairs, sites="z", positions=None, heads="each")
    >>> list(result.axes), result.n_prompts
    (['layer', 'head'], 2)
    """

    clean: Prompts
    corrupted: Prompts
    answers: Answers | None = None
    wrong_answers: Answers | None = None

    def __post_init__(self) -> None:
        n, n_corrupted = (_n_prompts(getattr(self, name), name) for name in ("clean", "corrupted"))
        if n != n_corrupted or not n:
            raise ValueError(f"pairs have as many clean as corrupted prompts, at least one; got {n} and {n_corrupted}")
        if self.answers is None and self.wrong_answers is not None:
            raise ValueError("wrong_answers are given without answers: give both, or neither")
        for name in ("answers", "wrong_answers"):
            if (given := _n_answers(getattr(self, name))) not in (None, n):
                raise ValueError(f"{name} are given for {given} pairs, and there are {n}: {NEST}")

    def __len__(self) -> int:
        return _n_prompts(self.clean, "clean")

    def __getitem__(self: Own, which: Indices) -> Own:
        places = indices_in("pairs", plain_indices("pairs", which), len(self))
        return replace(
            self,
            clean=_some_prompts(self.clean, places),
            corrupted=_some_prompts(self.corrupted, places),
            answers=_some_answers(self.answers, places),
            wrong_answers=_some_answers(self.wrong_answers, places),
        )

    def __iter__(self: Own) -> Iterator[Own]:
        return map(self.__getitem__, range(len(self)))

    def metric(self, model: HookedRootModule | TextMethods, positions: metrics.Positions = -1) -> metrics.Metric:
        """The logit difference of right and wrong answers; raises ValueError without both, or for answers of several tokens."""
        if self.answers is None or self.wrong_answers is None:
            missing = "answers and wrong_answers" if self.answers is None else "wrong_answers"
            raise ValueError(
                f"the logit difference needs answers and wrong answers: give Pairs their {missing}, or give a metric=, such as "
                "metrics.log_probability(answers, model=model)"
            )
        found = with_ids(model, with_chats(model, self))
        return _difference(model, cast("Answers", found.answers), cast("Answers", found.wrong_answers), positions)

    def __repr__(self) -> str:
        n, names = len(self), {"clean": "clean", "corrupted": "corrupted", "answers": "answer", "wrong_answers": "not"}
        given = {word: getattr(self, name) for name, word in names.items() if getattr(self, name) is not None}
        first = {word: _first(of) for word, of in given.items()}
        shown = ", ".join(f"{word} {_brief(of)}" for word, of in first.items())
        return f"{type(self).__name__}({'1 pair' if n == 1 else f'{n} pairs, the first'}: {shown})"

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file, atomically. Raises TypeError for prompts with images, and for a Chat."""
        given = {of.name: getattr(self, of.name) for of in fields(self)}
        if any(isinstance(value, Chat) for value in given.values()):
            raise TypeError("pairs of a Chat are not saved: give Pairs the messages, or save each with chat.save(path)")
        if any(isinstance(value, VisionInputs) for value in given.values()):
            raise TypeError("pairs with images are not saved: save their texts, and the images as files of their own")
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        stored.write(path, FORMAT, tensors, {name: value for name, value in given.items() if name not in tensors})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Pairs":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, others = stored.read(path, FORMAT)
        return cls(**others, **tensors)


def _n_prompts(prompts: Prompts, name: str) -> int:
    if (several := conversations_in(prompts)) is not None:
        return len(several)
    if not isinstance(prompts, (str, Tensor, Sequence, VisionInputs, Chat)):
        raise TypeError(f"{name} must be texts, ids, conversations or VisionInputs, got {kind_of(prompts)}")
    if isinstance(prompts, VisionInputs):
        return len(prompts) if isinstance(prompts, ImagesAndTexts) else _n_prompts(prompts.tokens, name)
    return 1 if isinstance(prompts, str) or (isinstance(prompts, Tensor) and prompts.ndim < 2) else len(prompts)


def _n_answers(answers: Answers | None) -> int | None:
    """The number of pairs that answers are given for; None: any."""
    if not isinstance(answers, (list, tuple, Tensor)) or (isinstance(answers, Tensor) and not answers.ndim):
        return None
    return None if len(answers) == 1 else len(answers)


def _some_prompts(prompts: Prompts, places: list[int]) -> Prompts:
    if isinstance(prompts, VisionInputs):
        raise TypeError("prompts with images are divided by their model: model.rows(pairs.clean, [0, 1])")
    if isinstance(prompts, Tensor):
        return (prompts if prompts.ndim > 1 else prompts[None])[places]
    if isinstance(prompts, Chat):
        return prompts[places]
    if (several := conversations_in(prompts)) is not None:
        return [several[place] for place in places]
    texts = cast("str | Sequence[str]", prompts)
    return [([texts] if isinstance(texts, str) else texts)[place] for place in places]


def _some_answers(answers: Answers | None, places: list[int]) -> Answers | None:
    if _n_answers(answers) is None:
        return answers
    assert isinstance(answers, (list, tuple, Tensor)), "one for each pair"
    return answers[places] if isinstance(answers, Tensor) else [answers[place] for place in places]


def _first(given: object) -> object:
    """The first of prompts or answers; a conversation as a line."""
    if (several := conversations_in(given.messages if isinstance(given, Chat) else given)) is not None:
        return transcript(several[0])
    return given[0] if isinstance(given, (list, tuple)) else given


def _brief(given: object) -> str:
    """A prompt or an answer in a line: the beginning of a text."""
    return (
        f"{given[:MOST_LETTERS]!r}{'…' * (len(given) > MOST_LETTERS)}" if isinstance(given, str) else short_repr(given)
    )


def with_chats(model: object, pairs: Own) -> Own:
    """Pairs whose messages are a `Chat` each; others are unchanged."""
    several = {name: conversations_in(getattr(pairs, name)) for name in ("clean", "corrupted")}
    chats: dict[str, Any] = {name: as_prompts(model, each) for name, each in several.items() if each is not None}
    return replace(pairs, **chats)


def with_ids(model: object, pairs: Pairs) -> Pairs:
    """Pairs of a `Chat` each, with the ids of answers that begin a text; others are unchanged."""
    chats = [prompts for prompts in (pairs.clean, pairs.corrupted) if isinstance(prompts, Chat)]
    if not chats or not isinstance(model, TextMethods) or not all(begins_text(chat, model.tokenizer) for chat in chats):
        return pairs
    answers: dict[str, Any] = {
        name: first_words(getattr(pairs, name), name, model) for name in ("answers", "wrong_answers")
    }
    return Pairs(pairs.clean, pairs.corrupted, **answers)


# ---- as arguments ----------------------------------------------------------------------------------------------------


def prompts_of(corrupted: Prompts | Pairs, clean: Prompts | None) -> tuple[Prompts, Prompts | None]:
    """The corrupted and the clean prompts of a function that takes `Pairs` in place of both.

    Raises TypeError for Pairs beside other prompts.
    """
    if isinstance(clean, Pairs):
        raise TypeError("Pairs have both prompts: give them in place of corrupted and clean, as sweep(model, pairs)")
    if isinstance(corrupted, Pairs) and clean is not None:
        raise TypeError(
            f"clean={short_repr(clean)} is given beside Pairs, which have the clean prompts: leave one out, and name the "
            "arguments that follow"
        )
    return (corrupted.corrupted, corrupted.clean) if isinstance(corrupted, Pairs) else (corrupted, clean)


def metric_of(
    model: HookedRootModule | TextMethods, metric: M | None, answers: RightAndWrong | None
) -> M | metrics.Metric | None:
    """The metric, or the logit difference of answers that are given in place of one; raises TypeError for both."""
    if answers is None:
        return metric
    if metric is not None:
        raise TypeError("metric and answers are both given: answers are short for metric=metrics.logit_difference(...)")
    if not isinstance(answers, tuple) or len(answers) != 2:
        raise TypeError(
            'answers must be a tuple of the right and the wrong ones, such as (" Mary", " John"), or of two lists with one for '
            f"each prompt; got {short_repr(answers)}"
        )
    return _difference(model, *answers)


def needed_metric(
    model: HookedRootModule | TextMethods, metric: Metrics | None, answers: RightAndWrong | None
) -> Metrics:
    """As `metric_of`; raises TypeError also without both."""
    found: Metrics | None = metric_of(model, metric, answers)
    if found is None:
        raise TypeError(NO_METRIC)
    return found


def _difference(
    model: HookedRootModule | TextMethods, right: Answers, wrong: Answers, positions: metrics.Positions = -1
) -> metrics.Metric:
    of_text = model if isinstance(model, TextMethods) else None  # ids need none
    return metrics.logit_difference(right, wrong, positions, model=of_text)


def unpaired(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None,
    metric: M | None,
    answers: RightAndWrong | None = None,
) -> tuple[Prompts, Prompts | None, M | metrics.Metric | None]:
    """The prompts and the metric: what is given, or else that of Pairs with answers. Raises as `prompts_of` and `metric_of`."""
    both, pairs, found = prompts_of(corrupted, clean), corrupted, metric_of(model, metric, answers)
    if found is None and isinstance(pairs, Pairs) and pairs.answers is not None:
        return *both, pairs.metric(model)
    return *both, found


def prompts_and_metric(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None,
    metric: Metrics | None,
    answers: RightAndWrong | None = None,
) -> tuple[Prompts, Prompts | None, Metrics]:
    """As `unpaired`, for a function that needs a metric; raises TypeError without one."""
    corrupted, clean, metric = unpaired(model, corrupted, clean, metric, answers)
    if metric is None:
        raise TypeError(NO_METRIC)
    return corrupted, clean, metric


def pair_of(
    model: HookedRootModule,
    corrupted: Prompts,
    clean: Prompts | None,
    name: str = "corrupted",
    reads_pairs: bool = False,
    same_length: bool = True,
) -> tuple[PromptRows, PromptRows]:
    """What the model reads of corrupted and of clean prompts, pair by pair.

    Raises as `rows_of`, TypeError without clean prompts, and ValueError for another number of prompts or, with `same_length`, of
    tokens. `name` is that of the corrupted prompts in errors; `reads_pairs` as for `rows_of`.
    """
    if clean is None:
        raise TypeError("the clean prompts are missing: give clean=..., or Pairs in place of both")
    rows = rows_of(model, corrupted, name, reads_pairs), rows_of(model, clean, "clean", reads_pairs)
    aligned(*rows, model, same_length)
    return rows


def both_runs(
    model: HookedRootModule,
    corrupted: Prompts,
    clean: Prompts | None,
    direction: str,
    decoder_input: Target = None,
    name: str = "corrupted",
    reads_pairs: bool = False,
) -> tuple[HookedRootModule, Rows, Rows | None]:
    """The model to run, what it reads in the run that is changed, and in the other one; raises as `pair_of`."""
    check_direction(direction)
    first: Rows
    other: Rows | None
    if clean is not None:
        first, other = pair_of(model, corrupted, clean, name, reads_pairs)
    elif direction == "noise":
        raise ValueError("direction='noise' changes the clean run: give clean=...")
    else:
        first, other = rows_of(model, corrupted, name, reads_pairs), None
    if has_two_stacks(model):
        first = joined(model, ids_of(first), decoder_input)
        other = None if other is None else joined(model, ids_of(other), decoder_input)
    elif decoder_input is not None:
        raise ValueError(f"decoder_input is for encoder-decoders, and this is a {type(model).__name__}")
    return (model, first, other) if direction == "denoise" or other is None else (model, other, first)


def aligned(corrupted: Rows, clean: Rows, model: HookedRootModule | TextMethods, same_length: bool = True) -> None:
    """Raises ValueError unless both have the same number of prompts and tokens; it shows where texts first differ."""
    if isinstance(corrupted, ImagesAndTexts) and len(ids_of(corrupted)) != len(ids_of(clean)):
        raise ValueError(
            f"clean and corrupted runs must have as many texts; they have {len(ids_of(clean))} and {len(ids_of(corrupted))}"
        )
    if not same_length and len(corrupted) != len(clean):
        raise ValueError(f"each corrupted prompt needs a clean one; there are {len(corrupted)} and {len(clean)}")
    if same_length and corrupted.shape != clean.shape:
        raise ValueError(
            f"clean and corrupted prompts must have the same shape (prompts, tokens); they have {tuple(clean.shape)} and "
            f"{tuple(corrupted.shape)}{_first_difference(corrupted, clean, model)}"
        )


def _first_difference(corrupted: Rows, clean: Rows, model: HookedRootModule | TextMethods, n_tokens: int = 6) -> str:
    """The tokens of the first prompts from where they differ, if there is a tokenizer."""
    both = [ids_of(rows)[0].tolist() for rows in (clean, corrupted)]
    if getattr(model, "tokenizer", None) is None or both[0] == both[1]:
        return ""
    at = next((i for i, (one, other) in enumerate(zip(*both, strict=False)) if one != other), min(map(len, both)))
    words = [[model.to_single_str_token(token) for token in ids[at : at + n_tokens]] for ids in both]
    shown = [f"{found}{' ...' * (len(ids) > at + n_tokens)}" for found, ids in zip(words, both, strict=True)]
    return f"; from position {at} on the clean tokens are {shown[0]}, and the corrupted ones {shown[1]}"
