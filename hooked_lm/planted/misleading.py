"""Models written by hand in which single ablations or correlations mislead: a backup head, redundant heads, and distractors."""

from functools import partial
from random import Random

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.planted.blueprint import START, Blueprint
from hooked_lm.planted.planted import Example, Planted, draw_pairs, edges_of, neurons_of

LETTERS = tuple("abcdefgh")
VOWELS, CONSONANTS, BLANK = tuple("aeiou"), tuple("bcdfg"), "_"


def look_at(n: int, position: int) -> Float[Tensor, "query key"]:
    """A relation of the last position to another one."""
    found = torch.zeros(n, n)
    found[-1, position] = 1
    return found


def backup(seed: int) -> Planted:
    """The second letter, twice over."""
    vocabulary, n_ctx = (START, *LETTERS, BLANK, "?"), 6
    size = len(vocabulary)
    draft = Blueprint(vocabulary, {"answer": size}, n_ctx=n_ctx, n_layers=2, n_heads=2)
    letters = draft.one_hots((letter, letter) for letter in LETTERS)
    copy = partial(draft.head, query="position", key="position", value="token", output="answer")
    copy((0, 1), relation=look_at(n_ctx, 2), mapping=letters)
    copy((1, 0), relation=look_at(n_ctx, 2), mapping=letters, rests_on="answer")
    draft.logits({"answer": torch.eye(size)})
    draft.bystanders(seed)

    def example(rng: Random) -> Example:
        clean, corrupted = ([rng.choice(LETTERS) for _ in range(4)] for _ in range(2))
        right, wrong = rng.sample(LETTERS, 2)
        clean[1], corrupted[1] = right, BLANK
        return [START, *clean, "?"], [START, *corrupted, "?"], right, wrong

    model = draft.model()
    pairs, held_out = draw_pairs(example, vocabulary, seed)
    edges = ["input > L0H1<v>", "L0H1 > logits", "L0H1 > L1H0<q>", "input > L1H0<v>", "L1H0 > logits"]
    return Planted(
        name="backup",
        description="Says the second letter, which L0H1 copies; a backup head, L1H0, copies the same if L0H1 wrote nothing.",
        model=model,
        vocabulary=vocabulary,
        pairs=pairs,
        held_out=held_out,
        truth=edges_of(model, edges),
        misleading="Cutting L0H1 off from the letter in the clean run changes nothing, because L1H0 steps in; and L1H0 writes "
        "the same in both runs, nothing, so that no exchange of its output alone has an effect.",
    )


def redundancy(seed: int) -> Planted:
    """The letter that three heads see, of which two suffice."""
    vocabulary, n_ctx = (START, *LETTERS, "?"), 7
    size = len(vocabulary)
    draft = Blueprint(vocabulary, dict.fromkeys(("votes", "answer"), size), n_ctx, n_layers=2, n_heads=4, d_mlp=24)
    for head in range(3):
        relation = look_at(n_ctx, head + 1)
        draft.head((0, head), query="position", key="position", value="token", output="votes", relation=relation)
    each = torch.eye(size)[:, 1 : 1 + len(LETTERS)]
    steps = {"votes": torch.cat([2 * each, 2 * each], 1)}, {"answer": torch.cat([each.T, -each.T])}
    used = draft.neurons(0, *steps, bias=[-2.5] * len(LETTERS) + [-3.5] * len(LETTERS))
    draft.logits({"answer": torch.eye(size)})
    draft.bystanders(seed)

    def example(rng: Random) -> Example:
        right, wrong = rng.sample(LETTERS, 2)
        clean, corrupted = ([letter] * 3 + rng.sample(LETTERS, 2) for letter in (right, wrong))
        return [START, *clean, "?"], [START, *corrupted, "?"], right, wrong

    model = draft.model()
    pairs, held_out = draw_pairs(example, vocabulary, seed)
    votes = [edge for head in range(3) for edge in (f"input > L0H{head}<v>", f"L0H{head} > m0")]
    return Planted(
        name="redundancy",
        description="Says the letter that the first three tokens are: L0H0, L0H1 and L0H2 vote for one of them each, and m0 says "
        "a letter with at least two votes; a third one adds nothing.",
        model=model,
        vocabulary=vocabulary,
        pairs=pairs,
        held_out=held_out,
        truth=edges_of(model, [*votes, "m0 > logits"]),
        neurons=neurons_of(model, {0: used}),
        misleading="Exchanging what one of the three heads sees or writes changes nothing in either run, because the other two "
        "suffice: patching of single edges finds only the edge from m0 to the logits, and two together have an effect.",
    )


def distractor(seed: int) -> Planted:
    """The first letter, with two heads beside the one that matters that know it as well."""
    vocabulary, n_ctx = (START, *VOWELS, *CONSONANTS, "?"), 5
    size = len(vocabulary)
    draft = Blueprint(vocabulary, {"answer": size, "copy": size, "mark": 1, "shade": 1}, n_ctx, n_layers=2, n_heads=3)
    look = partial(draft.head, query="position", key="position", value="token", relation=look_at(n_ctx, 1))
    look((0, 0), output="copy")
    look((0, 1), output="answer")
    marks = torch.zeros(size, 1)
    for letters, mark in ((VOWELS, 1.0), (CONSONANTS, -1.0)):
        marks[[draft.token(letter) for letter in letters]] = mark
    look((0, 2), output="mark", mapping=marks)
    draft.neurons(0, {"mark": torch.tensor([[1.0, -1.0]])}, {"shade": torch.ones(2, 1)})
    vowels = 2 * (marks > 0).float().T
    draft.logits({"answer": torch.eye(size), "shade": vowels}, dict.fromkeys(VOWELS, -2.0))
    draft.bystanders(seed)

    def example(rng: Random) -> Example:
        right, wrong = rng.choice(VOWELS), rng.choice(CONSONANTS)
        clean, corrupted = (rng.sample([*VOWELS, *CONSONANTS], 2) for _ in range(2))
        return [START, right, *clean, "?"], [START, wrong, *corrupted, "?"], right, wrong

    model = draft.model()
    pairs, held_out = draw_pairs(example, vocabulary, seed)
    return Planted(
        name="distractor",
        description="Says the first letter, which L0H1 copies. L0H0 copies it, too, to where nothing reads it; L0H2 writes a "
        "number, 1 for a vowel and -1 for a consonant, of which m0 passes on the size alone.",
        model=model,
        vocabulary=vocabulary,
        pairs=pairs,
        held_out=held_out,
        truth=edges_of(model, ["input > L0H1<v>", "L0H1 > logits"]),
        misleading="Probes read the answer from L0H0 and its kind from L0H2, the gradient at L0H2 is the largest, and without it "
        "answers are wrong. But nothing reads L0H0, and m0 is the same for both signs of L0H2: neither causes the difference.",
    )
