"""Thought anchors against what is known of the bundled reasoning model: `python -m tests.benchmarks.thoughts`.

For each measure, how often something that matters has a higher value than something that does not (AUC; ties count half), on
additions that the model was not trained on, of the model and of an untrained one; and the lengths of sentences as a measure.
"""

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import thought_anchors
from hooked_lm.demo import steps

N_ADDITIONS, N_ROLLOUTS, N_HEADS, DISTANCE, LARGE = 12, 50, 3, 2, 0.1
Scored = tuple[list[float], list[bool]]


def solutions(seed: int = 11) -> list[steps.Solution]:
    """Right solutions of held-out additions, every second of which has a choice."""
    rng = random.Random(seed)
    additions = [steps.random_addition(rng, held_out=True, has_choice=i % 2 == 0) for i in range(N_ADDITIONS)]
    return [steps.random_solution(addition, rng, error_rate=0.0) for addition in additions]


def matters(solution: steps.Solution) -> list[bool]:
    """Which sentences decide the answer: columns, and a choice if there was one."""
    has_choice = len(solution.addition.others) > 1
    return [one.kind == "column" or (one.kind == "choice" and has_choice) for one in solution.sentences]


def measures(model: HookedTransformer, some: Sequence[steps.Solution], n: int) -> dict[str, Scored]:
    """Of each measure its values, and whether what they are of is known to matter; NaN left out."""
    found: dict[str, Scored] = {}
    for solution in some:
        anchors = thought_anchors(model, model.chat(solution.messages), n=n, distance=DISTANCE)
        of_sentences, pairs = matters(solution), list(_pairs(anchors.suppression))
        depends = [bool(solution.depends[pair]) for pair in pairs]
        lengths = [one.stop - one.start for one in anchors.sentences]
        values = {
            "counterfactual": ([one.mean for one in anchors.importance()], of_sentences),
            "resampling": ([one.mean for one in anchors.importance("resampling")], of_sentences),
            "received": (anchors.received_from(N_HEADS).tolist(), of_sentences),
            "suppression, answer": (anchors.suppression[-1].tolist(), solution.depends[-1].tolist()),
            "suppression, pairs": ([float(anchors.suppression[pair]) for pair in pairs], depends),
            "length, pairs": ([float(lengths[sentence]) for _, sentence in pairs], depends),
        }
        for name, scored in values.items():
            for kept, more in zip(found.setdefault(name, ([], [])), scored, strict=True):
                kept.extend(more)
    return found


def _pairs(suppression: Tensor) -> Iterator[tuple[int, int]]:
    yield from map(tuple, (~suppression.isnan()).nonzero().tolist())


def auc(scored: Scored) -> float:
    """How often a true one has a higher value than a false one; ties count half."""
    values, truth = torch.tensor(scored[0], dtype=torch.float64), torch.tensor(scored[1])
    true, false = values[truth & ~values.isnan()], values[~truth & ~values.isnan()]
    gaps = true[:, None] - false
    return round(((gaps > 0).double() + 0.5 * (gaps == 0)).mean().item(), 3)


def main() -> None:
    """Prints a row for each measure."""
    model = HookedTransformer.from_pretrained("demo-steps")
    trained, untrained = (measures(each, solutions(), N_ROLLOUTS) for each in (model, model.untrained(0)))
    print(f"measure | AUC | untrained | mean of what matters, of what does not | above {LARGE} | of these untrained")
    for name, scored in trained.items():
        values, truth = torch.tensor(scored[0]), torch.tensor(scored[1])
        mean = [f"{values[which].nanmean().item():.3f}" for which in (truth, ~truth)]
        print(
            name,
            *map(auc, (scored, untrained[name])),
            ", ".join(mean),
            _large(scored),
            _large(untrained[name]),
            sep=" | ",
        )


def _large(scored: Scored) -> str:
    values, truth = torch.tensor(scored[0]), torch.tensor(scored[1])
    return " and ".join(f"{int((values[which] > LARGE).sum())} of {int(which.sum())}" for which in (truth, ~truth))


if __name__ == "__main__":
    main()
