"""What the bundled verbalizer was trained to say: texts of the demonstration model's generator, and questions about them.

`PATH` is the folder of its adapter, for `model.with_adapter(PATH)` and `verbalize(..., adapter=PATH)`.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random

from hooked_lm.demo import corpus

PATH = Path(__file__).parent / "verbalizer"
LAYER = 1
SITE = f"blocks.{LAYER}.hook_resid_post"
SLOT = " key"
QUESTIONS = {
    "country": "The country of the key is",
    "city": "The city of the key is",
    "name": "The name of the key is",
    "pronoun": "The doctor of the key is",
    "day": "The journey of the key is",
}
"""The prompts, by what they ask for. The vector is put at the token `SLOT`."""


@dataclass(frozen=True)
class Item:
    """A text, and what is to be read in the vector at its last token."""

    question: str
    text: str
    answer: str


_TASKS = {"country": "capitals", "city": "landmarks", "name": "indirect_object", "pronoun": "pronouns", "day": "days"}


def item(rng: Random, held_out: bool, question: str | None = None) -> Item:
    """A text of the generator and a question about it; held-out texts have combinations of words that no others have."""
    question = question or rng.choice(list(QUESTIONS))
    example = corpus.draw(rng, _TASKS[question], held_out)
    while question == "pronoun" and example.answer not in (" she", " he"):
        example = corpus.draw(rng, _TASKS[question], held_out)
    answer = f" {example.key[1]}" if question == "country" else example.answer
    return Item(question, example.prompt, answer)
