"""Steering on the bundled model: steering vectors from pairs of prompts, a ranking of layers and heads, and steered texts.

    python demos/steering.py

The pairs are sentences about women and about men. It takes a few seconds.
"""

from hooked_lm import HookedTransformer
from hooked_lm.analysis import metrics
from hooked_lm.demo import corpus
from hooked_lm.interventions.contrast import rank_heads
from hooked_lm.interventions.steering import steering_vectors, sweep_steering


def main() -> None:
    """Computes the directions, measures how well they separate the pairs, and steers with them."""
    model = HookedTransformer.from_pretrained("demo")
    women, men = ([f"{name} was tired, so" for name in names] for names in (corpus.FEMALE_NAMES, corpus.MALE_NAMES))
    vectors = steering_vectors(model, women, men)
    print(vectors, vectors.to_dataframe().round(2).to_string(index=False), sep="\n\n")
    print("\n", rank_heads(model, women, men).select(metric="d_prime").top(5).round(1).to_string(index=False), sep="")

    prompts = [
        "Mary went home because",
        "Tom left early because",
        "Anna called the doctor when",
        "Paul slept late when",
    ]
    she = metrics.logit_difference(model.to_single_token(" she"), model.to_single_token(" he"))
    sweep = sweep_steering(model, vectors, prompts, she, coefficients=[-2, -1, 0, 1, 2], progress=False)
    table = sweep.to_dataframe().pivot(index="layer", columns="coefficient", values="mean")
    print("\nlogit of ' she' minus logit of ' he', by layer and coefficient\n", table.round(1).to_string(), sep="")
    for coefficient in (-2.0, 0.0, 2.0):
        with model.hooks(vectors.hooks(coefficient)):
            texts = model.generate(prompts, 5, do_sample=False, verbose=False)
        print(f"\ncoefficient {coefficient:+.0f}", *(text.partition(".")[0] + "." for text in texts), sep="\n  ")


if __name__ == "__main__":
    main()
