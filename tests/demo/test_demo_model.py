"""The shipped demonstration model does what its card says, on held-out items."""

import itertools
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.demo import corpus

MODEL = Path(corpus.__file__).parent / "model"
THRESHOLDS = dict.fromkeys(corpus.TASKS, 0.95) | {"indirect_object": 0.99, "capitals": 0.99}
ITEMS = 200


class Demo(NamedTuple):
    """All that the tests need of the model."""

    model: HookedTransformer

    def encode(self, text: str) -> list[int]:
        return self.model.to_tokens(text, prepend_bos=False)[0].tolist()

    @torch.no_grad()
    def logits(self, prompts: list[str]) -> Tensor:
        """Prompts to the logits after each, read alone after BOS: [prompt, d_vocab]."""
        return self.model(prompts, padding_side="left", logits_to_keep=1)[:, 0]

    @torch.no_grad()
    def run(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens to logits and attention patterns [layer, batch, head, query_pos, key_pos]."""
        logits, cache = self.model.run_with_cache(tokens, names_filter="blocks.*.attn.hook_pattern")
        return logits, cache.stack("*")


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo(HookedTransformer.from_pretrained("demo"))


def single_tokens(demo: Demo, texts: list[str]) -> torch.Tensor:
    tokens = [demo.encode(text) for text in texts]
    assert all(len(token) == 1 for token in tokens)
    return torch.tensor(tokens)[:, 0]


@pytest.mark.parametrize("task", [task for task in corpus.TASKS if task != "greater_than"])
def test_most_likely_token_is_the_answer(demo: Demo, task: str):
    rng = random.Random(2)
    examples = [corpus.TASKS[task](rng) for _ in range(ITEMS)]
    answers = single_tokens(demo, [example.answer for example in examples])
    predicted = demo.logits([example.prompt for example in examples]).argmax(-1)
    assert (predicted == answers).float().mean() >= THRESHOLDS[task]


@pytest.mark.slow
def test_greater_years_are_likelier(demo: Demo):
    rng = random.Random(2)
    examples = [corpus.TASKS["greater_than"](rng) for _ in range(ITEMS)]
    probabilities = demo.logits([example.prompt for example in examples]).softmax(-1)
    correct = []
    for row, example in zip(probabilities, examples, strict=True):
        greater = single_tokens(demo, corpus.greater_years(example))
        correct.append(row.argmax() in greater and row[greater].sum() > 0.5)
    assert sum(correct) / ITEMS >= THRESHOLDS["greater_than"]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("When Mary and John went to the store, John gave a drink to", " Mary"),
        ("When John and Mary went to the store, John gave a drink to", " Mary"),
        ("The capital of France is", " Paris"),
        ("The Eiffel Tower is in", " Paris"),
        ("Mary went home because", " she"),
        ("John went home because", " he"),
        ("The keys to the cabinet", " are"),
        ("The key to the cabinets", " is"),
        ("Monday, Tuesday, Wednesday,", " Thursday"),
        ("After Monday comes", " Tuesday"),
        ("January, February, March,", " April"),
    ],
)
def test_classic_prompts(demo: Demo, prompt: str, answer: str):
    assert demo.encode(answer) == [demo.logits([prompt])[0].argmax()]


@pytest.mark.parametrize("period", [10, 25, 40, 60])
def test_repeated_random_tokens(demo: Demo, period: int):
    sequences = torch.randint(
        0, demo.model.cfg.d_vocab - 1, (25, period), generator=torch.Generator().manual_seed(period)
    )
    bos = demo.model.tokenizer.bos_token_id
    sequences += sequences >= bos
    tokens = torch.cat([torch.full((25, 1), bos), sequences, sequences], dim=1)
    logits, patterns = demo.run(tokens)
    # Nothing announces the first token of the second copy.
    correct = logits[:, period + 1 : -1].argmax(-1) == tokens[:, period + 2 :]
    assert correct.float().mean() >= 0.95
    induction = patterns.diagonal(1 - period, -2, -1)[..., -period:].mean((1, -1))
    assert induction.max() >= 0.5


def test_corrupted_pairs_turn_the_answer_around(demo: Demo):
    clean, corrupted, answers, foils = zip(*corpus.ioi_pairs(random.Random(2), 50), strict=True)
    assert [len(demo.encode(text)) for text in clean] == [len(demo.encode(text)) for text in corrupted]
    for prompts, expected in ((clean, answers), (corrupted, foils)):
        predicted = demo.logits(list(prompts)).argmax(-1)
        assert (predicted == single_tokens(demo, list(expected))).float().mean() >= 0.95


def test_words_that_matter_are_single_tokens(demo: Demo):
    spaced = [*corpus.NAMES, *corpus.CITIES, *corpus.CAPITALS, *corpus.DAYS, *corpus.MONTHS, *corpus.WORDS]
    pronouns = ["he", "she", "his", "her"]
    single_tokens(demo, [f" {word}" for word in spaced + pronouns])
    single_tokens(demo, corpus.NAMES + corpus.DAYS + corpus.MONTHS + corpus.YEARS)
    assert len(demo.encode(" 1732")) == 2


def test_model_is_small():
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 6e6


@pytest.mark.slow
def test_held_out_items_are_not_in_the_training_text():
    rng = random.Random(2)
    training = {corpus.training_text(rng) for _ in range(20_000)}
    held_out = {task(rng).text for task in corpus.TASKS.values() for _ in range(500)}
    assert not training & held_out


def test_held_out_pairs_of_names_never_meet():
    rng = random.Random(2)
    names = set(corpus.NAMES)
    for _ in range(20_000):
        met = sorted(names.intersection(re.findall(r"\w+", corpus.training_text(rng))))
        assert not any(corpus.is_held_out("indirect_object", *pair) for pair in itertools.combinations(met, 2))


def test_generator_is_deterministic():
    assert corpus.training_text(random.Random(5)) == corpus.training_text(random.Random(5))
