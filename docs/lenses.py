"""Measures how often each lens shows what a model says later, and writes the table to docs/reading.md.

`python docs/lenses.py` takes a few minutes. Lenses are fitted on some texts, and read on others, which were held out of the
training. Prompts of one thought are a group: intervals count thoughts.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hooked_lm import HookedTransformer, planted
from hooked_lm.analysis import fit_jacobian_lens, lens_recall, train_tuned_lens
from hooked_lm.demo import corpus, steps, tasks
from hooked_lm.models.twins import twin_of
from hooked_lm.results.measures import MetricScores

PAGE = Path(__file__).parent / "reading.md"
MARK = re.compile(r"(?<=<!-- lens recall -->\n).*?(?=<!-- end -->)", re.S)
N_TEXTS, N_THOUGHTS, N_PROMPTS, N_RANDOM = 48, 16, 64, 8
LENSES = ("logit", "tuned", "J", "R")


@dataclass
class Question:
    """Prompts, the token of each that is looked for, the tokens it is compared with, and the layers at which it is."""

    name: str
    prompts: Sequence[Any]
    answers: Sequence[Any]
    layers: Sequence[int]
    candidates: Sequence[Any] | None = None
    groups: Sequence[int] | None = None


def demo_questions() -> Iterator[Question]:
    """The next token, at the end of held-out prompts of the bundled model."""
    for name in ("indirect_object", "pronouns", "agreement", "days"):
        pairs = tasks.pairs(name, N_PROMPTS if name != "days" else 12)
        yield Question(f"`demo`: {name}", pairs.clean, pairs.answers, (0, 1, 2))


def additions(n: int, seed: int, held_out: bool) -> list[steps.Solution]:
    """Additions written out, without wrong sums."""
    rng = Random(seed)
    return [steps.random_solution(steps.random_addition(rng, held_out), rng, 0.0) for _ in range(n)]


def steps_questions(model: HookedTransformer) -> Iterator[Question]:
    """What a column of an addition says after its sum: the digit to write, where the sum has two, at the equals sign before."""
    prompts, digits, carries, groups = [], [], [], []
    for number, said in enumerate(additions(N_PROMPTS, 1, True)):
        ids = model.chat(said.messages).tokens[0]
        words = model.to_str_tokens(ids)
        for place, word in enumerate(words):
            if word == " =" and words[place + 1] == " 1" and words[place + 2] in "023456789":
                prompts.append(ids[: place + 1])
                digits.append(f" {words[place + 2]}")
                groups.append(number)
            if word == " =":
                carries.append((ids[: place + 1], words[words.index(" carry", place) + 1], number))
    others = [f" {digit}" for digit in "023456789"]
    yield Question("`demo-steps`: digit to write, five tokens later", prompts, digits, (0, 1, 2), others, groups)
    rows, values, numbers = zip(*carries, strict=True)
    yield Question("`demo-steps`: carry, seven or eight tokens later", rows, values, (0, 1, 2), [" 0", " 1"], numbers)


def planted_questions(example: planted.Planted) -> Iterator[Question]:
    """The first look-up, of which the answer is the second."""
    prompts, answers = example.held_out.clean, example.held_out.answers
    facts = [dict(zip(row[1:9:2], row[2:9:2], strict=True)) for row in prompts.tolist()]
    middles = [known[row[-1]] for known, row in zip(facts, prompts.tolist(), strict=True)]
    letters = list(range(1, 9))
    yield Question("`two-hop`: the first look-up", prompts, middles, (0, 1), letters)
    yield Question("`two-hop`: the answer", prompts, answers, (0, 1), letters)


def lenses_of(model: HookedTransformer, texts: Any) -> dict[str, Any]:
    """All lenses of a model, fitted on the same texts."""
    J, R = (fit_jacobian_lens(model, texts, backward=name) for name in ("plain", "relp"))
    tuned = train_tuned_lens(model, texts, steps=250)
    return {"logit": None, "tuned": tuned, "J": J, "R": R, **{f"random {i}": J.rotated(i) for i in range(N_RANDOM)}}


def measured(model: HookedTransformer, texts: Any, questions: Sequence[Question]) -> list[MetricScores]:
    lenses = lenses_of(model, texts)
    return [
        lens_recall(
            model,
            one.prompts,
            one.answers,
            lenses,
            candidates=one.candidates,
            layers=list(one.layers),
            groups=one.groups,
        )
        for one in questions
    ]


def rows_of(question: Question, found: MetricScores, twin: MetricScores) -> Iterator[str]:
    low, high = found.interval()
    most, random = twin.mean[: len(LENSES)].max(0).values, found.mean[len(LENSES) :]
    for place, layer in enumerate(question.layers):
        cells = [
            f"{found.mean[i, place]:.2f} ({low[i, place]:.2f} to {high[i, place]:.2f})" for i in range(len(LENSES))
        ]
        drawn = random[:, place]
        cells.append(f"{drawn.mean():.2f} ({drawn.min():.2f} to {drawn.max():.2f})")
        chance = found.about["chance"]
        yield f"| {question.name} | {layer} | {' | '.join(cells)} | {most[place]:.2f} | {chance:.2f} |"


def subjects() -> dict[str, tuple[HookedTransformer, Any, Sequence[Question]]]:
    """The models, the texts on which their lenses are fitted, and what is read."""
    rng = Random(0)
    demo, stepwise = (HookedTransformer.from_pretrained(name) for name in ("demo", "demo-steps"))
    hop = planted.load("two-hop")
    thoughts = stepwise.chat([said.messages for said in additions(N_THOUGHTS, 0, False)])
    return {
        "demo": (demo, [corpus.training_text(rng) for _ in range(N_TEXTS)], [*demo_questions()]),
        "demo-steps": (stepwise, thoughts, [*steps_questions(stepwise)]),
        "two-hop": (hop.model, hop.pairs.clean, [*planted_questions(hop)]),
    }


def table(models: Mapping[str, tuple[HookedTransformer, Any, Sequence[Question]]]) -> str:
    lines = [
        f"| what is looked for | layer | {' | '.join(LENSES)} | random | untrained | chance |",
        f"|---|---|{'---:|' * len(LENSES)}---:|---:|---:|",
    ]
    for model, texts, questions in models.values():
        pairs = zip(
            questions, measured(model, texts, questions), measured(twin_of(model), texts, questions), strict=True
        )
        for question, found, twin in pairs:
            lines += rows_of(question, found, twin)
    return "\n".join(lines) + "\n"


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = table(subjects())
    text = PAGE.read_text(encoding="utf-8")
    assert MARK.search(text), f"{PAGE} has no place for the table"
    PAGE.write_text(MARK.sub(lambda _: found, text), encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
