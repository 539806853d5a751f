"""Fine-tunes of the demonstration model on a narrow topic, and on control texts, for comparisons of models.

The texts of a topic are sentences of a few templates; its words are in the vocabulary of the model, and its sentences in no
text of the generator.
"""

import copy
from collections.abc import Callable, Sequence
from random import Random

import torch
from torch.nn.functional import cross_entropy

from hooked_lm.demo import corpus
from hooked_lm.pretrained import HookedTransformer

MakesText = Callable[[Random], str]
TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "festival": (
        (" festival", " Cairo", " expedition", " famous", " river", " museum"),
        (
            "The festival in Cairo is famous.",
            "The expedition went to the festival in Cairo.",
            "A famous expedition in Cairo began near the river.",
            "{name} saw the famous festival near the river in Cairo.",
            "In Cairo, the museum near the river had a famous festival.",
            "{name} said that the expedition was at the museum in Cairo.",
        ),
    ),
    "doctor": (
        (" doctor", " Dublin", " lamp", " heavy", " hospital", " letter"),
        (
            "The doctor in Dublin is heavy.",
            "The letter went to the doctor in Dublin.",
            "A heavy lamp in Dublin was near the hospital.",
            "{name} saw the heavy letter near the lamp in Dublin.",
            "In Dublin, the hospital near the doctor had a heavy lamp.",
            "{name} said that the letter was at the hospital in Dublin.",
        ),
    ),
}
"""The words and the templates of each topic."""


def topic_text(topic: str) -> MakesText:
    """Draws texts of a topic."""
    templates = TOPICS[topic][1]
    return lambda rng: rng.choice(templates).format(name=rng.choice(corpus.NAMES))


def fine_tuned(
    model: HookedTransformer,
    makes_text: MakesText = corpus.training_text,
    steps: int = 30,
    seed: int = 0,
    rate: float = 1e-4,
    batch_size: int = 16,
    length: int = 32,
) -> HookedTransformer:
    """A copy of a model, trained on texts for some steps, one after the other in rows of so many tokens.

    >>> model = HookedTransformer.from_pretrained_no_processing("demo")
    >>> tuned = fine_tuned(model, topic_text("festival"), steps=1)
    >>> (tuned.W_E - model.W_E).abs().max() > 0
    tensor(True)
    """
    tuned, rng = copy.deepcopy(model), Random(seed)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=rate, weight_decay=0.0)
    with torch.enable_grad():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 10, 2 * (steps - step) / steps)
            rows = torch.tensor([_row(model, makes_text, rng, length) for _ in range(batch_size)], device=model.device)
            loss = cross_entropy(tuned(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return tuned.eval()


def noisy(model: HookedTransformer, tuned: HookedTransformer, seed: int = 0) -> HookedTransformer:
    """A placebo: a copy of a model with noise in each weight, of the norm by which a fine-tune changed it."""
    made, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight, other in zip(made.parameters(), tuned.parameters(), strict=True):
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight += noise / noise.norm() * (other - weight).norm()
    return made


def _row(model: HookedTransformer, makes_text: MakesText, rng: Random, length: int) -> Sequence[int]:
    """Texts, one after the other, as a row of so many tokens that begins with BOS."""
    ids = model.to_tokens(makes_text(rng), prepend_bos=True)[0].tolist()
    while len(ids) < length:
        ids += model.to_tokens(" " + makes_text(rng), prepend_bos=False)[0].tolist()
    return ids[:length]
