"""Train a sparse autoencoder on the output of the second MLP of the bundled model, inspect its features, steer with one.

    python demos/sae.py [dictionary.safetensors]

A TopK autoencoder is trained on generated texts and evaluated on others. The strongest features are shown with the texts that
activate them most. The feature with the largest attribution to "she" is then increased during generation. It takes about a
minute on one core.
"""

import sys
from random import Random

import torch

from hooked_lm import HookedTransformer
from hooked_lm.demo.corpus import training_text
from hooked_lm.interventions.dictionaries import SAE, Dictionary, Features, run_with_features, train_dictionary

SITE = "blocks.1.hook_mlp_out"
N_TEXTS, N_NAMED = 6000, 5


def main(path: str = "dictionary.safetensors") -> None:
    """Runs everything, prints the results, writes the dictionary."""
    model = HookedTransformer.from_pretrained("demo")
    rng = Random(0)
    texts = [training_text(rng) for _ in range(N_TEXTS)]
    trained = train_dictionary(model, texts, site=SITE, width=512, k=16, steps=600, skip=1, progress=True)
    trained.sae.save(path)
    for figure, value in trained.figures.to_dataframe()[["figure", "mean"]].itertuples(index=False):
        print(f"{figure:22} {value:.3f}")

    strongest = features_by_strength(model, trained.sae, texts[:300])
    for feature in strongest[:N_NAMED]:
        print(f"\nfeature {feature}:")
        for value, shown in top_texts(model, trained.sae, texts[:300], feature):
            print(f"  {value:6.2f}  {shown}")

    feature = most_attributed(model, trained.sae, "Mary went home because", " she", " he")
    print(f"\nfeature {feature}, which makes the model say 'she', added to another text:")
    for value, shown in top_texts(model, trained.sae, texts[:300], feature):
        print(f"  {value:6.2f}  {shown}")
    for amount in (0, 4, 8, 12, 16):
        steered, difference = steer(model, trained.sae, "John went home because", feature, amount)
        print(f"  + {amount:2}: logit of she - he {difference:6.2f}  {steered}")


def most_attributed(model: HookedTransformer, sae: SAE, prompt: str, right: str, wrong: str) -> int:
    """The feature with the largest attribution (gradient times feature) to the logit difference of two next tokens."""
    dictionary = Dictionary(SITE, sae=sae)
    logits = model.run_with_hooks(prompt, fwd_hooks=[dictionary])[0, -1]
    difference = logits[model.to_single_token(right)] - logits[model.to_single_token(wrong)]
    [gradient] = torch.autograd.grad(difference, dictionary.features)
    return int((gradient * dictionary.features)[0].sum(0).argmax())


@torch.no_grad()
def steer(model: HookedTransformer, sae: SAE, prompt: str, feature: int, amount: float) -> tuple[str, float]:
    """The generated text with a feature increased at every position, and the logit difference of she and he."""

    def stronger(features: torch.Tensor) -> None:
        features[:, :, feature] += amount

    with model.hooks([Dictionary(SITE, sae=sae, edit=stronger)]):
        logits = model(prompt)[0, -1]
        text = model.generate(prompt, max_new_tokens=4, do_sample=False, verbose=False)
    difference = logits[model.to_single_token(" she")] - logits[model.to_single_token(" he")]
    return repr(text), difference.item()


@torch.no_grad()
def features_by_strength(model: HookedTransformer, sae: SAE, texts: list[str]) -> list[int]:
    """The features that are active at less than 2% of positions, the strongest first."""
    watch = Features(SITE, sae=sae)
    found = torch.cat([run_with_features(model, text, [watch])[1][SITE][0, 1:] for text in texts])
    is_rare = (found > 0).float().mean(0) < 0.02
    return (found.amax(0) * is_rare).argsort(descending=True).tolist()


@torch.no_grad()
def top_texts(
    model: HookedTransformer, sae: SAE, texts: list[str], feature: int, k: int = 3
) -> list[tuple[float, str]]:
    """The texts with the largest values of a feature, and the values; the token of the maximum is in brackets."""
    found = []
    for text in texts:
        _, features = run_with_features(model, text, [Features(SITE, sae=sae)])
        values = features[SITE][0, 1:, feature]
        position = int(values.argmax()) + 1
        tokens = model.to_str_tokens(text)
        before, after = "".join(tokens[1:position]), "".join(tokens[position + 1 :])
        found.append((values.max().item(), f"{before}[{tokens[position]}]{after}"))
    return sorted(found, reverse=True)[:k]


if __name__ == "__main__":
    main(*sys.argv[1:])
