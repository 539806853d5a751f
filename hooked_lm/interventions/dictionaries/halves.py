"""Halves of labelled prompts, one to fit and one to test, in which no prompt or group is in both."""

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.results.labels import Label

LEAST = 4  # distinct prompts, or groups, with a label: two to fit, two to test


def held_together(*shared: Sequence[Hashable]) -> Int[Tensor, " prompt"]:
    """The unit of each prompt, a number from 0 on: prompts with the same entry in one of the lists are one, also by others.

    >>> held_together(["a", "b", "b", "c", "d"], [1, 1, 2, 3, 3]).tolist()
    [0, 0, 0, 1, 1]
    """
    unit = torch.arange(len(shared[0]))
    while True:
        before = unit
        for entries in shared:
            place = {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
            which = torch.tensor([place[entry] for entry in entries])
            unit = torch.full_like(unit, len(unit)).scatter_reduce(0, which, unit, "amin")[which]
        if torch.equal(unit, before):
            return unit.unique(return_inverse=True)[1]


def half(labels: Sequence[Label], units: Int[Tensor, " prompt"], seed: int) -> Bool[Tensor, " prompt"]:
    """The prompts for fitting: those of every second unit, in a random order of the units of each label in turn. A unit with
    several labels counts for its most frequent one.

    Raises ValueError for labels in fewer than four units, and for one that is in one half alone.
    """
    of_unit: dict[int, list[Label]] = {}
    for unit, label in zip(units.tolist(), labels, strict=True):
        of_unit.setdefault(unit, []).append(label)
    known = sorted({*labels}, key=str)
    for label in known:
        if (n := sum(label in each for each in of_unit.values())) < LEAST:
            raise ValueError(
                f"the label {label!r} has {n} distinct prompts or groups, and needs at least {LEAST}: two to fit, two to test"
            )
    most = {unit: Counter(each).most_common(1)[0][0] for unit, each in of_unit.items()}
    drawn = torch.randperm(len(most), generator=torch.Generator().manual_seed(seed)).tolist()
    ordered = sorted(drawn, key=lambda unit: known.index(most[unit]))
    train = torch.isin(units, torch.tensor(ordered[::2]))
    for label in known:
        there = torch.tensor([each == label for each in labels])
        if not bool(there[train].any()) or not bool(there[~train].any()):
            raise ValueError(
                f"one half of the prompts has none with the label {label!r}, as prompts that are the same or of one group have "
                "several labels: give more prompts, or another seed"
            )
    return train
