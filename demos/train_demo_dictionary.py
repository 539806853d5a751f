"""Train the dictionary of the demonstration model that ships with hooked_lm.

    python demos/train_demo_dictionary.py --out hooked_lm/demo/dictionary.safetensors

A TopK dictionary of 512 features of the residual stream after layer 1, on texts of `hooked_lm.demo.corpus`: two minutes on one
CPU thread. It prints the figures on held-out texts.
"""

import argparse
from random import Random

from hooked_lm import HookedTransformer
from hooked_lm.demo.corpus import training_text
from hooked_lm.interventions.dictionaries import SAE, train_dictionary

SITE, WIDTH, K = ("resid_post", 1), 512, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="hooked_lm/demo/dictionary.safetensors")
    parser.add_argument("--texts", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random = Random(1)
    texts = [training_text(random) for _ in range(arguments.texts)]
    model = HookedTransformer.from_pretrained("demo")
    trained = train_dictionary(
        model, texts, site=SITE, kind="topk", width=WIDTH, k=K, steps=arguments.steps, skip=1, seed=arguments.seed
    )
    print(trained.figures)
    assert isinstance(trained.sae, SAE)
    trained.sae.save(arguments.out)


if __name__ == "__main__":
    main()
