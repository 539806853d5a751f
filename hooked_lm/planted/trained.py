"""A transformer trained with few weights (Gao et al. 2025, arXiv:2511.13653), and the language that it reads.

    x = ( a b ) ; y = " c " ; x . ; y + ;

A statement gives a name a value, which closes as it opened: with the same quote, or with the bracket of its kind. Or it uses a
name, and what follows depends on the kind of its last value: + for quotes, . for brackets. `demos/train_sparse_model.py` trains
the model, in which all but a few of the weights are 0. So most edges of its graph carry little or nothing. Its truth is not
made but measured: the edges that exact patching finds, and that do together what the model does.
"""

from random import Random

from hooked_lm.planted.blueprint import START
from hooked_lm.planted.planted import Example

NAMES, ITEMS = ("x", "y", "z", "w"), ("a", "b", "c", "d", "e")
CLOSES = {'"': '"', "'": "'", "(": ")", "[": "]"}
USES = {'"': "+", "'": "+", "(": ".", "[": "."}
VOCABULARY = (START, *NAMES, "=", *CLOSES, ")", "]", *ITEMS, "+", ".", ";")
N_CTX, N_TOKENS = 32, 16  # of the model, and of a prompt


def statement(rng: Random, kinds: dict[str, str]) -> list[str]:
    """A statement drawn at random; `kinds` has what the values of the names so far open with, and is kept up to date."""
    if kinds and rng.random() < 0.5:
        name = rng.choice(list(kinds))
        return [name, USES[kinds[name]], ";"]
    name, opening = rng.choice(NAMES), rng.choice(list(CLOSES))
    kinds[name] = opening
    items = [rng.choice(ITEMS) for _ in range(rng.randint(1, 4))]
    return [name, "=", opening, *items, CLOSES[opening], ";"]


def random_tokens(rng: Random, n: int = N_CTX) -> list[str]:
    """The first `n` tokens of random statements, after the start token."""
    kinds: dict[str, str] = {}
    tokens = [START]
    while len(tokens) < n:
        tokens += statement(rng, kinds)
    return tokens[:n]


def closing(rng: Random) -> Example:
    """A value before it closes, after other statements; the corrupted prompt opens another way."""
    while True:
        kinds: dict[str, str] = {}
        before = [token for _ in range(rng.randint(0, 3)) for token in statement(rng, kinds)]
        opening, other = rng.sample(list(CLOSES), 2)
        name, items = rng.choice(NAMES), rng.choices(ITEMS, k=rng.randint(2, 4))
        both = [[START, *before, name, "=", each, *items] for each in (opening, other)]
        if len(both[0]) == N_TOKENS:
            return both[0], both[1], CLOSES[opening], CLOSES[other]
