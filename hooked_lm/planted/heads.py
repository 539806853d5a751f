"""Models of attention heads, written by hand: what heads find and copy, alone and one after the other."""

from random import Random

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.planted.blueprint import SHARP, START, Blueprint
from hooked_lm.planted.planted import Example, Planted, draw_pairs, edges_of, neurons_of

LETTERS = tuple("abcdefgh")
SOFT = 5.0  # a score at which attention is spread, and has a gradient


def step_back(n: int, positions: range | None = None) -> Float[Tensor, "query key"]:
    """A relation of positions to the one before, for some positions; None: for all."""
    found = torch.zeros(n, n)
    for position in positions or range(1, n):
        found[position, position - 1] = 1
    return found


def previous_token(seed: int) -> Planted:
    """The letter before the last one."""
    vocabulary, n_ctx = (START, *LETTERS), 5
    draft = Blueprint(vocabulary, {"previous": len(vocabulary)}, n_ctx=n_ctx, n_layers=2, n_heads=2)
    draft.head(
        (0, 1), query="position", key="position", value="token", output="previous", relation=step_back(n_ctx)
    )  # fmt: skip
    draft.logits({"previous": torch.eye(len(vocabulary))})
    draft.bystanders(seed)

    def example(rng: Random) -> Example:
        clean, corrupted = rng.sample(LETTERS, 4), rng.sample(LETTERS, 4)
        right, wrong = rng.sample(LETTERS, 2)
        clean[2], corrupted[2] = right, wrong
        return [START, *clean], [START, *corrupted], right, wrong

    model = draft.model()
    pairs, held_out = draw_pairs(example, vocabulary, seed)
    return Planted(
        name="previous-token",
        description="Says the token before the last one, which a previous-token head (L0H1) copies.",
        model=model,
        vocabulary=vocabulary,
        pairs=pairs,
        held_out=held_out,
        truth=edges_of(model, ["input > L0H1<v>", "L0H1 > logits"]),
    )


def induction(seed: int, score: float = SHARP) -> Planted:
    """The letter that followed the last one before."""
    vocabulary, n_ctx = (START, *LETTERS), 8
    size = len(vocabulary)
    draft = Blueprint(vocabulary, {"previous": size, "answer": size}, n_ctx=n_ctx, n_layers=2, n_heads=3)
    back = step_back(n_ctx, range(2, n_ctx))
    draft.head((0, 0), query="position", key="position", value="token", output="previous", relation=back, score=score)
    draft.head((1, 2), query="token", key="previous", value="token", output="answer", score=score)
    draft.logits({"answer": torch.eye(size)})
    draft.bystanders(seed)

    def example(rng: Random) -> Example:
        one, other, third, right, wrong, spare = rng.sample(LETTERS, 6)
        facts = [(one, right), (other, wrong), (third, spare)]
        change, asked = rng.choice(["query", "keys", "value"]), one
        changed = {
            "query": facts,
            "keys": [(other, right), (one, wrong), (third, spare)],
            "value": [(one, wrong), (other, right), (third, spare)],
        }[change]
        order = rng.sample(range(3), 3)
        clean, corrupted = ([token for i in order for token in some[i]] for some in (facts, changed))
        return [START, *clean, asked], [START, *corrupted, other if change == "query" else asked], right, wrong

    model = draft.model()
    pairs, held_out = draw_pairs(example, vocabulary, seed)
    edges = ["input > L0H0<v>", "L0H0 > L1H2<k>", "input > L1H2<q>", "input > L1H2<v>", "L1H2 > logits"]
    is_soft = score < SHARP
    how = "spread attention, which has gradients" if is_soft else "saturated attention, which has no gradient"
    return Planted(
        name="soft-induction" if is_soft else "induction",
        description="Says what followed the last token before: an induction head (L1H2) finds the position whose previous "
        f"token, which L0H0 copied there, is the last one; with {how}.",
        model=model,
        vocabulary=vocabulary,
        pairs=pairs,
        held_out=held_out,
        truth=edges_of(model, edges),
    )


def soft_induction(seed: int) -> Planted:
    """As `induction`, with attention that is not saturated."""
    return induction(seed, SOFT)


def two_hop(seed: int) -> Planted:
    """What follows that which follows the last letter."""
    vocabulary, n_ctx = (START, *LETTERS), 10
    size = len(vocabulary)
    subspaces = {"previous": size, "hop": size, "answer": size}
    draft = Blueprint(vocabulary, subspaces, n_ctx=n_ctx, n_layers=3, n_heads=2)
    back = step_back(n_ctx, range(2, n_ctx - 1, 2))
    draft.head((0, 0), query="position", key="position", value="token", output="previous", relation=back)
    draft.head((1, 1), query="token", key="previous", value="token", output="hop")
    draft.head((2, 0), query="hop", key="previous", value="token", output="answer")
    draft.logits({"answer": torch.eye(size)})
    draft.bystanders(seed)

    def example(rng: Random) -> Example:
        one, other, middle, second, right, wrong = rng.sample(LETTERS, 6)
        facts = [(one, middle), (other, second), (middle, right), (second, wrong)]
        change, asked = rng.choice(["query", "first keys", "first values", "second keys", "second values"]), one
        changed = {
            "query": facts,
            "first keys": [(other, middle), (one, second), *facts[2:]],
            "first values": [(one, second), (other, middle), *facts[2:]],
            "second keys": [*facts[:2], (second, right), (middle, wrong)],
            "second values": [*facts[:2], (middle, wrong), (second, right)],
        }[change]
        order = rng.sample(range(4), 4)
        clean, corrupted = ([token for i in order for token in some[i]] for some in (facts, changed))
        return [START, *clean, asked], [START, *corrupted, other if change == "query" else asked], right, wrong

    model = draft.model()
    pairs, held_out = draw_pairs(example, vocabulary, seed)
    edges = [
        *("input > L0H0<v>", "L0H0 > L1H1<k>", "input > L1H1<q>", "input > L1H1<v>"),
        *("L1H1 > L2H0<q>", "L0H0 > L2H0<k>", "input > L2H0<v>", "L2H0 > logits"),
    ]
    return Planted(
        name="two-hop",
        description="Looks up the last token among facts (a pair of tokens each), and what it finds again: L0H0 copies the first "
        "token of a fact to the second, L1H1 is the first look-up, and L2H0, whose queries are what L1H1 found, the second.",
        model=model,
        vocabulary=vocabulary,
        pairs=pairs,
        held_out=held_out,
        truth=edges_of(model, edges),
    )


def copy_suppression(seed: int) -> Planted:
    """Of the two letters that a cue proposes, that which was not said before."""
    cues = ("A", "B", "C", "D")
    vocabulary, n_ctx = (START, *LETTERS, *cues), 5
    proposals = {cue: LETTERS[2 * i : 2 * i + 2] for i, cue in enumerate(cues)}
    draft = Blueprint(vocabulary, {"proposal": len(vocabulary)}, n_ctx=n_ctx, n_layers=2, n_heads=2, d_mlp=12)
    proposed = draft.one_hots((cue, letter) for cue, some in proposals.items() for letter in some)
    neurons = draft.table(0, "token", "proposal", proposed)
    suppressed = -2 * draft.one_hots((letter, letter) for letter in LETTERS)
    draft.head((1, 0), query="proposal", key="token", value="token", output="proposal", mapping=suppressed)
    draft.logits({"proposal": torch.eye(len(vocabulary))})
    draft.bystanders(seed)

    def example(rng: Random) -> Example:
        cue, other = rng.sample(cues, 2)
        (said, right), (said_too, proposed_too) = (rng.sample(proposals[each], 2) for each in (cue, other))
        rest = rng.sample([letter for each in cues if each not in (cue, other) for letter in proposals[each]], 2)
        change = rng.choice(["said", "cue", "cue against the one said"])
        if change == "said":
            one, another = rng.sample(range(3), 2)
            clean, corrupted = [*rest, rest[0]], [*rest, rest[0]]
            clean[one], corrupted[another] = said, right
            return [START, *clean, cue], [START, *corrupted, cue], right, said
        context = rng.sample([said, said_too, rest[0]], 3)
        wrong = proposed_too if change == "cue" else said
        return [START, *context, cue], [START, *context, other], right, wrong

    model = draft.model()
    pairs, held_out = draw_pairs(example, vocabulary, seed)
    edges = ["input > m0", "m0 > logits", "m0 > L1H0<q>", "input > L1H0<k>", "input > L1H0<v>", "L1H0 > logits"]
    return Planted(
        name="copy-suppression",
        description="Of the two letters that the last token proposes (m0), says the one that the prompt has not: a "
        "copy-suppression head (L1H0) finds proposals in the prompt and lowers their logits.",
        model=model,
        vocabulary=vocabulary,
        pairs=pairs,
        held_out=held_out,
        truth=edges_of(model, edges),
        neurons=neurons_of(model, {0: neurons}),
    )
