"""Tasks of the bundled model as pairs of prompts: each item of the corpus that was held out, beside one with another answer.

A corrupted prompt has as many tokens as its clean one and differs in what decides the answer alone: another giver, country, day,
number of the subject, gender of the name, or order of the words. So the right and the wrong answer change places. Of
`greater_than` all years after the earlier start are right after the corrupted prompt, so there the answers are equally likely.
"""

import re
from collections.abc import Callable, Sequence
from random import Random

from hooked_lm.analysis.rankings.tasks import CircuitTask
from hooked_lm.demo import corpus
from hooked_lm.demo.corpus import Example, is_held_out
from hooked_lm.engine.pairs import Pairs
from hooked_lm.pretrained import HookedTransformer

N_PAIRS = 32
MOST_IDLE = 500  # draws without a new pair, after which there are none
N_YEARS = 4  # answers of each kind to an item of `greater_than`
Answers = str | list[str]
Drawn = tuple[str, str, Answers, Answers]  # clean, corrupted, answer, wrong answer


def tasks(
    model: HookedTransformer | None = None, names: Sequence[str] | None = None, n: int = N_PAIRS, seed: int = 0
) -> list[CircuitTask]:
    """The tasks of the bundled model, for `analysis.leaderboard`.

    Args:
        model: a model with the vocabulary of the bundled one, such as its untrained twin; None: the bundled one.
        names: those of the tasks, as in `corpus.TASKS`; None: all.
        n: the number of pairs of each, no two with the same clean prompt; fewer where the task does not have so many. The first
            half is searched, circuits are judged on the others.
        seed: seed of the items.

    Raises KeyError for an unknown task, and ValueError for fewer than two pairs.

    >>> [task.name for task in tasks(names=["capitals", "agreement"], n=4)]
    ['capitals', 'agreement']
    """
    if n < 2:
        raise ValueError(f"a task needs pairs to search and pairs to judge on, two at least; got n={n}")
    model = HookedTransformer.from_pretrained("demo") if model is None else model
    chosen = corpus.TASKS if names is None else names
    found = {name: _as_pairs(_drawn(name, n, seed, model, by_clean=True)) for name in chosen}
    return [CircuitTask(name, model, each) for name, each in found.items()]


def pairs(task: str, n: int = N_PAIRS, seed: int = 0, model: HookedTransformer | None = None) -> Pairs:
    """Pairs of prompts of a task, all with the same number of tokens. No clean prompt is in the training text.

    Args:
        task: a name in `corpus.TASKS`.
        n: the number of pairs, no two alike.
        seed: seed of the items.
        model: whose tokens are counted; None: the bundled model.

    Raises KeyError for an unknown task, and ValueError if so many different pairs were not drawn.

    >>> pairs("pronouns", 2)[0]
    Pairs(1 pair: clean 'Robert was afraid, so', corrupted 'Sarah was afraid, so', answer ' he', not ' she')
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    model = HookedTransformer.from_pretrained("demo") if model is None else model
    found = _drawn(task, n, seed, model)
    if len(found) < n:
        raise ValueError(f"{task} has fewer than n={n} different pairs of one length: {len(found)} were drawn")
    return _as_pairs(found)


def _as_pairs(drawn: Sequence[Drawn]) -> Pairs:
    clean, corrupted, right, wrong = map(list, zip(*drawn, strict=True))
    return Pairs(clean, corrupted, right, wrong)


def _drawn(task: str, n: int, seed: int, model: HookedTransformer, by_clean: bool = False) -> list[Drawn]:
    """As many different pairs of one length, or as many as were drawn; with `by_clean`, of different clean prompts."""
    if task not in _CORRUPT:
        raise KeyError(f"there is no task {task!r}: there are {', '.join(_CORRUPT)}")
    rng, by_length = Random(seed), dict[int, dict[tuple[str, ...], Drawn]]()
    n_idle = 0  # draws without a new pair
    while n_idle < MOST_IDLE:
        n_idle += 1
        drawn = _CORRUPT[task](corpus.TASKS[task](rng), rng)
        if drawn is None:
            continue
        length, other = (model.to_tokens(prompt).shape[1] for prompt in drawn[:2])
        same = by_length.setdefault(length, {})
        key = drawn[:1] if by_clean else drawn[:2]
        if length != other or key in same:
            continue
        same[key], n_idle = drawn, 0
        if len(same) == n:
            break
    return list(max(by_length.values(), key=len, default={}).values())


# ---- corrupted items: None if this item has none that was held out -------------------------------------------------------


def _other_giver(example: Example, rng: Random) -> Drawn:
    before, after = example.prompt.rsplit(example.wrong_answer, 1)
    return example.prompt, before + example.answer + after, example.answer, example.wrong_answer


def _other_fact(task: str, facts: dict[str, str]) -> Callable[[Example, Random], Drawn | None]:
    def corrupted(example: Example, rng: Random) -> Drawn | None:
        template, subject = map(str, example.key)
        others = [one for one in facts if facts[one] != facts[subject] and is_held_out(task, template, one)]
        if not others:
            return None
        other = rng.choice(others)
        prompt = example.prompt.replace(subject, other)
        return example.prompt, prompt, example.answer, f" {facts[other]}"

    return corrupted


def _other_order(example: Example, rng: Random) -> Drawn | None:
    """Exchanges the answer with a later word of the first copy, which the second has not reached."""
    words = example.prompt.split(" ")[1:]
    length = words.index(words[0], 1) if words[0] in words[1:] else len(words)
    stop, first = len(words) - length, words[:length]
    if not 0 < stop < length - 1:
        return None
    for later in rng.sample(range(stop + 1, length), length - stop - 1):
        other = list(first)
        other[stop], other[later] = first[later], first[stop]
        prompt = "".join(f" {word}" for word in other + words[length:])
        if is_held_out("repeated_sequences", prompt):
            return example.prompt, prompt, example.answer, f" {other[stop]}"
    return None


def _other_gender(example: Example, rng: Random) -> Drawn | None:
    name, said = map(str, example.key)
    names = corpus.MALE_NAMES if name in corpus.FEMALE_NAMES else corpus.FEMALE_NAMES
    others = [other for other in names if is_held_out("pronouns", other, said)]
    if not others:
        return None
    return example.prompt, example.prompt.replace(name, rng.choice(others), 1), example.answer, example.wrong_answer


def _other_number(example: Example, rng: Random) -> Drawn:
    noun, plural = str(example.key[0]), corpus.NOUNS[str(example.key[0])]
    start, subject, *rest = example.prompt.partition(f" {plural} " if f" {plural} " in example.prompt else f" {noun} ")
    other = f" {noun} " if subject == f" {plural} " else f" {plural} "
    return example.prompt, start + other + rest[0], example.answer, example.wrong_answer


def _other_last(cycle: list[str]) -> Callable[[Example, Random], Drawn]:
    """Another day or month, and the list before it; few are held out, so that it may be in the training text."""

    def corrupted(example: Example, rng: Random) -> Drawn:
        last = str(example.key[1])
        other = rng.choice([one for one in cycle if one != last])
        moved = cycle.index(other) - cycle.index(last)
        shifted = {one: cycle[(place + moved) % len(cycle)] for place, one in enumerate(cycle)}
        prompt = re.sub("|".join(cycle), lambda found: shifted[found[0]], example.prompt)
        return example.prompt, prompt, example.answer, f" {cycle[(cycle.index(other) + 1) % len(cycle)]}"

    return corrupted


def _earlier_start(example: Example, rng: Random) -> Drawn | None:
    """A start years before: the years in between are then right, too."""
    event, century, start = example.key[0], example.key[1], int(example.key[2])
    others = [year for year in range(2, start - 2 * N_YEARS) if is_held_out("greater_than", event, century, year)]
    if not others or start > 98 - N_YEARS:
        return None
    earlier = rng.choice(others)
    prompt = example.prompt.replace(f"{century}{start:02d}", f"{century}{earlier:02d}", 1)
    right, wrong = corpus.YEARS[start + 1 :], corpus.YEARS[earlier + 1 : start + 1]
    return example.prompt, prompt, sorted(rng.sample(right, N_YEARS)), sorted(rng.sample(wrong, N_YEARS))


_CORRUPT: dict[str, Callable[[Example, Random], Drawn | None]] = {
    "indirect_object": _other_giver,
    "capitals": _other_fact("capitals", corpus.CAPITALS),
    "landmarks": _other_fact("landmarks", corpus.LANDMARKS),
    "repeated_sequences": _other_order,
    "pronouns": _other_gender,
    "agreement": _other_number,
    "days": _other_last(corpus.DAYS),
    "months": _other_last(corpus.MONTHS),
    "greater_than": _earlier_start,
}
