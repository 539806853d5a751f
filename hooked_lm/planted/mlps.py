"""Models of MLPs, written by hand: facts that neurons store, and gates. Their truth is by neuron, too."""

from collections.abc import Callable
from random import Random

import torch

from hooked_lm.planted.blueprint import START, Blueprint
from hooked_lm.planted.planted import Example, Planted, draw_pairs, edges_of, neurons_of

PEOPLE = ("Ann", "Ben", "Eve", "Jim", "Kim", "Tom")
CITIES = ("Bonn", "Cork", "Lyon", "Metz", "Rome", "Ulm")
COUNTRIES = ("France", "Germany", "Ireland", "Italy")
LIVES_IN = dict(zip(PEOPLE, CITIES, strict=True))
LIES_IN = dict(zip(CITIES, ("Germany", "Ireland", "France", "France", "Italy", "Germany"), strict=True))


def facts(seed: int) -> Planted:
    """The country of the city of one of two people."""
    vocabulary = (START, *PEOPLE, *CITIES, *COUNTRIES, "first?", "second?")
    size, n_ctx, d_mlp = len(vocabulary), 4, 12
    draft = Blueprint(vocabulary, dict.fromkeys(("city", "asked", "country"), size), n_ctx, 2, 2, d_mlp)
    people = draft.table(0, "token", "city", draft.one_hots(LIVES_IN.items()))
    asks_for = torch.zeros(size, n_ctx)
    asks_for[draft.token("first?"), 1] = asks_for[draft.token("second?"), 2] = 1
    draft.head((1, 1), query="token", key="position", value="city", output="asked", relation=asks_for)
    cities = draft.table(1, "asked", "country", draft.one_hots(LIES_IN.items()))
    draft.logits({"country": torch.eye(size)})
    draft.bystanders(seed)

    def example(rng: Random) -> Example:
        two = rng.sample(PEOPLE, 2)
        place, right = rng.choice([("first?", two[0]), ("second?", two[1])])
        country = LIES_IN[LIVES_IN[right]]
        other = next(person for person in two if person != right)
        if rng.random() < 0.5 and LIES_IN[LIVES_IN[other]] != country:
            asked = "second?" if place == "first?" else "first?"
            return [START, *two, place], [START, *two, asked], country, LIES_IN[LIVES_IN[other]]
        new = rng.choice([person for person in PEOPLE if LIES_IN[LIVES_IN[person]] != country])
        changed = [new if person == right else rng.choice(PEOPLE) for person in two]
        return [START, *two, place], [START, *changed, place], country, LIES_IN[LIVES_IN[new]]

    model = draft.model()
    pairs, held_out = draw_pairs(example, vocabulary, seed)
    return Planted(
        name="facts",
        description="Says the country of the city of the first or the second person: a neuron of m0 for each person writes "
        "the city, L1H1 copies the city of the one that the last token asks for, and a neuron of m1 for each city its country.",
        model=model,
        vocabulary=vocabulary,
        pairs=pairs,
        held_out=held_out,
        truth=edges_of(
            model, ["input > m0", "m0 > L1H1<v>", "input > L1H1<q>", "L1H1 > m1", "m1 > logits"]
        ),
        neurons=neurons_of(model, {0: people, 1: cities}),
    )  # fmt: skip


def and_gate(seed: int) -> Planted:
    """Whether both bits are 1."""
    return _gate("and", seed)


def or_gate(seed: int) -> Planted:
    """Whether one of two bits is 1."""
    return _gate("or", seed)


def xor_gate(seed: int) -> Planted:
    """Whether two bits differ."""
    return _gate("xor", seed)


GATES: dict[str, Callable[[str, str], bool]] = {
    "and": lambda one, other: one == other == "1",
    "or": lambda one, other: "1" in (one, other),
    "xor": lambda one, other: one != other,
}
ANSWERS = {False: "no", True: "yes"}
ON = {"and": "both bits are 1", "or": "at least one bit is 1", "xor": "the bits differ"}
MISLEADING = {
    "and": "The prompts of a pair differ in both bits, and restoring one in the corrupted run changes nothing: patching in the "
    'direction "denoise" finds only the edge from m0 to the logits, "noise" finds all.',
    "or": "The prompts of a pair differ in both bits, and corrupting one in the clean run changes nothing: patching in the "
    'direction "noise" finds only the edge from m0 to the logits, "denoise" finds all.',
    "xor": "",
}


def _gate(kind: str, seed: int) -> Planted:
    """Two heads count ones, at the first and the third bit; a neuron for two ones, one for none, or both decide."""
    vocabulary, n_bits = (START, "0", "1", "?", "no", "yes"), 6
    n_ctx = n_bits + 2
    draft = Blueprint(vocabulary, {"ones": 1, "gate": 1}, n_ctx=n_ctx, n_layers=2, n_heads=3)
    is_one = torch.tensor([[0.0], [0.0], [1.0], [0.0], [0.0], [0.0]])
    for head, position in ((0, 1), (2, 3)):
        to_bit = torch.zeros(n_ctx, n_ctx)
        to_bit[-1, position] = 1
        draft.head(
            (0, head), query="position", key="position", value="token", output="ones", relation=to_bit, mapping=is_one
        )
    ones = {"and": [[2.0]], "or": [[-2.0]], "xor": [[2.0, -2.0]]}[kind]  # a neuron for both, one for none
    bias = {"and": [-3.0], "or": [1.0], "xor": [-3.0, 1.0]}[kind]
    writes = {"and": [[1.0]], "or": [[-1.0]], "xor": [[-1.0], [-1.0]]}[kind]
    used = draft.neurons(0, {"ones": torch.tensor(ones)}, {"gate": torch.tensor(writes)}, bias)
    yes = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    draft.logits({"gate": yes}, {"yes": 0.0 if kind == "and" else 1.0, "no": 0.5})
    draft.bystanders(seed)

    def example(rng: Random) -> Example:
        clean, corrupted = ([rng.choice("01") for _ in range(n_bits)] for _ in range(2))
        one, other = rng.sample((0, 2), 2)
        if kind == "xor":
            corrupted[one], corrupted[other] = "10"[int(clean[one])], clean[other]
        else:
            clean[one] = clean[other] = "1"
            corrupted[one] = corrupted[other] = "0"
        answers = [ANSWERS[GATES[kind](some[one], some[other])] for some in (clean, corrupted)]
        return [START, *clean, "?"], [START, *corrupted, "?"], answers[0], answers[1]

    model = draft.model()
    pairs, held_out = draw_pairs(example, vocabulary, seed)
    edges = ["input > L0H0<v>", "input > L0H2<v>", "L0H0 > m0", "L0H2 > m0", "m0 > logits"]
    return Planted(
        name=f"{kind}-gate",
        description=f"Says whether {ON[kind]}, of the first and the third: L0H0 and L0H2 count ones, and "
        f"{len(used)} of the neurons of m0 compute the gate.",
        model=model,
        vocabulary=vocabulary,
        pairs=pairs,
        held_out=held_out,
        truth=edges_of(model, edges),
        neurons=neurons_of(model, {0: used}),
        misleading=MISLEADING[kind],
    )
