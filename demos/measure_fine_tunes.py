"""Measure what docs/comparing.md says of fine-tunes of the demonstration model and of their controls.

    python demos/measure_fine_tunes.py

Each seed draws the texts of the fine-tunes, the noise, and the start of the crosscoders; the prompts are the same for all.
"""

import time
from random import Random

import torch

from hooked_lm import HookedTransformer
from hooked_lm.analysis import compare_models
from hooked_lm.demo import corpus, finetunes
from hooked_lm.interventions.dictionaries import train_crosscoder

WORDS, OTHERS = finetunes.TOPICS["festival"][0], finetunes.TOPICS["doctor"][0]
OPTIONS = {
    "site": ("resid_post", 2),
    "width": 256,
    "k": 8,
    "steps": 300,
    "vectors_per_step": 256,
    "skip": 1,
    "progress": False,
}


def prompts(n: int) -> list[str]:
    """Texts of the generator of more than five words."""
    rng = Random(9)
    found = (corpus.training_text(rng) for _ in range(4 * n))
    return [text for text in found if len(text.split()) > 5][:n]


def main() -> None:
    torch.set_num_threads(1)
    base, start = HookedTransformer.from_pretrained_no_processing("demo", device="cpu"), time.time()
    for seed in range(2):
        topic = finetunes.fine_tuned(base, finetunes.topic_text("festival"), seed=seed)
        models = {
            "the topic": topic,
            "the other topic": finetunes.fine_tuned(base, finetunes.topic_text("doctor"), seed=seed),
            "the data that it had before": finetunes.fine_tuned(base, seed=seed),
            "noise of the same size": finetunes.noisy(base, topic, seed=seed),
            "the base itself": base,
        }
        for name, model in models.items():
            found = compare_models(base, model, prompts(48), answers=WORDS, wrong_answers=OTHERS)
            everything = compare_models(base, model, prompts(48), answers=WORDS)
            shares = [each.topic.mean[0].mean().item() for each in (found, everything)]
            print(
                f"seed {seed}: {name}: KL {found.kl.mean[-1]:.4f} nats, words of the topic outrank {shares[0]:.2f} of those of",
                end=" ",
            )
            print(f"the other, {shares[1]:.2f} of all tokens", flush=True)
        makes_text, rng = finetunes.topic_text("festival"), Random(3)
        mixed = [makes_text(rng) if i % 2 else corpus.training_text(rng) for i in range(300)]
        for name in ("the topic", "the data that it had before", "the base itself"):
            share = train_crosscoder(base, models[name], mixed, **OPTIONS, seed=seed).tuned_share
            print(f"seed {seed}: crosscoder with {name}: shares {share.min():.2f} to {share.max():.2f}", flush=True)
    print(f"{(time.time() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
