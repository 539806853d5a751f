"""Additions with carries, written out step by step: what the bundled reasoning model was trained on.

The question may leave a choice between two numbers. The thought takes one, adds column by column, with a remark after each
sentence, and the answer is put together from the columns:

    Add 347 to 285 or 136.
    <think>
    I take 136. Good. Ones: 7 + 6 = 13, write 3, carry 1. Next. Tens: 4 + 3 + 1 = 8, write 8, carry 0. Fine. ...
    </think>
    483

So it is known which sentence depends on which: a column on the choice, if there was one, and on the carry of the column before,
the answer on all columns, and nothing on a remark. One column in ten has a wrong sum, with which the thought goes on: what
follows can be known only from what was written, and samples of the same thought differ.

A fixed hash holds out one pair of numbers in eight for evaluation.
"""

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from jaxtyping import Bool
from torch import Tensor

COLUMNS = ("Ones", "Tens", "Hundreds")
REMARKS = ("Good.", "Fine.", "So far so good.", "Let me go on.", "That was easy.", "Next.")
CHOICE_RATE, ERROR_RATE = 0.5, 0.1
HELD_OUT_SHARE = 8
SMALLEST, LARGEST = 100, 999  # numbers of three digits


@dataclass(frozen=True)
class Addition:
    """What is asked: to add a number to another one, or to one of two."""

    first: int
    others: tuple[int, ...]

    @property
    def text(self) -> str:
        """The question.

        >>> Addition(347, (285, 136)).text
        'Add 347 to 285 or 136.'
        """
        return f"Add {self.first} to {' or '.join(map(str, self.others))}."

    @property
    def is_held_out(self) -> tuple[bool, ...]:
        """Whether the sum of each pair of numbers is kept for evaluation."""
        return tuple(zlib.crc32(f"{self.first}+{other}".encode()) % HELD_OUT_SHARE == 0 for other in self.others)


def random_addition(rng: random.Random, held_out: bool = False, has_choice: bool | None = None) -> Addition:
    """A question drawn at random, all of whose sums are held out, or none; with a choice, without, or either."""
    has_choice = rng.random() < CHOICE_RATE if has_choice is None else has_choice
    while True:
        first, *others = (rng.randint(SMALLEST, LARGEST) for _ in range(3 if has_choice else 2))
        addition = Addition(first, tuple(others))
        if set(addition.is_held_out) == {held_out}:
            return addition


@dataclass(frozen=True)
class Sentence:
    """A sentence of a thought; `kind` is "choice", "column" or "remark"."""

    kind: str
    text: str


@dataclass(frozen=True)
class Solution:
    """A thought and the answer to which it leads."""

    addition: Addition
    sentences: tuple[Sentence, ...]
    answer: str

    @property
    def thought(self) -> str:
        """The sentences in a row."""
        return " ".join(sentence.text for sentence in self.sentences)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation: the question, and the answer with its thought."""
        answer = {"role": "assistant", "reasoning_content": self.thought, "content": self.answer}
        return [{"role": "user", "content": self.addition.text}, answer]

    @cached_property
    def depends(self) -> Bool[Tensor, "later sentence"]:
        """Whether what a sentence says depends on an earlier one: [later, sentence], of which the last row is the answer.

        A number that is the only one is known from the question, too.

        >>> said = solution([347, 136], Addition(347, (285, 136)))
        >>> [sentence.kind for sentence in said.sentences][:5]
        ['choice', 'remark', 'column', 'remark', 'column']
        >>> said.depends[-1].tolist() == [one.kind == "column" for one in said.sentences]
        True
        >>> said.depends[4].nonzero().flatten()
        tensor([0, 2])
        """
        kinds = [sentence.kind for sentence in self.sentences]
        choices = [i for i, kind in enumerate(kinds) if kind == "choice" and len(self.addition.others) > 1]
        columns = [i for i, kind in enumerate(kinds) if kind == "column"]
        found = torch.zeros(len(kinds) + 1, len(kinds), dtype=torch.bool)
        found[-1, columns] = True
        for before, i in zip([None, *columns], columns, strict=False):
            found[i, [j for j in choices if j < i]] = True
            if before is not None:
                found[i, before] = True
        return found


def solution(
    numbers: Sequence[int],
    addition: Addition | None = None,
    sums: Sequence[int] | None = None,
    remarks: Sequence[str] = ("Good.",) * (1 + len(COLUMNS)),
) -> Solution:
    """The sum of two numbers written out, with a remark after each sentence.

    `sums` are those of the columns, from the ones on; by default the right ones.

    >>> solution([347, 136]).thought[:59]
    'I take 136. Good. Ones: 7 + 6 = 13, write 3, carry 1. Good.'
    >>> solution([347, 136], sums=[13, 9, 4]).answer
    '493'
    """
    first, second = numbers
    sentences, digits, carry = [Sentence("choice", f"I take {second}.")], "", 0
    for place, name in enumerate(COLUMNS):
        terms = [number // 10**place % 10 for number in numbers] + [carry] * (place > 0)
        total = sum(terms) if sums is None else sums[place]
        carry, digit = divmod(total, 10)
        digits = f"{digit}{digits}"
        column = f"{name}: {' + '.join(map(str, terms))} = {total}, write {digit}, carry {carry}."
        sentences.append(Sentence("column", column))
    pairs = [(sentence, Sentence("remark", remark)) for sentence, remark in zip(sentences, remarks, strict=True)]
    return Solution(addition or Addition(first, (second,)), tuple(chain(*pairs)), f"{carry or ''}{digits}")


def random_solution(addition: Addition, rng: random.Random, error_rate: float = ERROR_RATE) -> Solution:
    """A solution as the model was trained on: the choice and remarks at random, and some sums that are wrong."""
    numbers = [addition.first, rng.choice(addition.others)]
    remarks = rng.choices(REMARKS, k=1 + len(COLUMNS))
    sums: list[int] = []
    for place in range(len(COLUMNS)):
        carry = sums[-1] // 10 if sums else 0
        right = sum(number // 10**place % 10 for number in numbers) + carry
        wrong = rng.choice([total for total in range(20) if total != right])
        sums.append(wrong if rng.random() < error_rate else right)
    return solution(numbers, addition, sums, remarks)


def read_solution(addition: Addition, thought: str, answer: str) -> Solution:
    """What a model wrote, sentence by sentence. Raises ValueError for a sentence of another form.

    >>> said = solution([347, 136])
    >>> read_solution(said.addition, said.thought, said.answer) == said
    True
    """
    column = rf"(?:{'|'.join(COLUMNS)}): \d(?: \+ \d){{1,2}} = \d+, write \d, carry \d\."
    forms = {"choice": r"I take \d+\.", "column": column, "remark": "|".join(map(re.escape, REMARKS))}
    sentences, rest = [], thought.strip()
    while rest:
        starts = ((kind, re.match(rf"(?:{form})(?: |$)", rest)) for kind, form in forms.items())
        kind, match = next(((kind, match) for kind, match in starts if match), ("", None))
        if match is None:
            raise ValueError(f"no sentence of an addition starts at {rest[:40]!r}")
        sentences.append(Sentence(kind, match[0].rstrip()))
        rest = rest[match.end() :]
    return Solution(addition, tuple(sentences), answer.strip())
