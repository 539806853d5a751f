"""Which prompts a search sees, and which are left to judge what it finds.

A search finds the edges that its prompts need, and their peculiarities with them: on the same prompts what it finds looks better
than on others. So a circuit keeps digests of the prompts of its search, and is evaluated on others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from hooked_lm.analysis import metrics
from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.attribution.gradients import Metric
from hooked_lm.analysis.circuits.circuit import SEEN, Circuit
from hooked_lm.engine.experiment import Experiment
from hooked_lm.engine.identity import PROMPTS, identities
from hooked_lm.engine.metric_rows import RearrangedMetric
from hooked_lm.engine.pairs import Pairs, RightAndWrong, pair_of, unpaired
from hooked_lm.engine.prompts import Prompts, chosen, some_rows
from hooked_lm.engine.result import SweepResult
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import PromptRows, Rows

SHARE, ENOUGH = 0.5, 8  # of the pairs, held out by default if there are so many
JUDGED = "judged_on"  # in `about` of an evaluation
UNSEEN, SAME, PARTLY = (
    "prompts that the search did not see",
    "same prompts as the search",
    "partly the same prompts as the search",
)
HeldOut = float | Sequence[int] | None
Own = TypeVar("Own", bound=SweepResult)


# ---- metrics of some prompts -----------------------------------------------------------------------------------------


def is_per_prompt(model: Decoder, metric: Metric | None, clean: Rows, max_memory: int | str) -> bool:
    """Whether a metric has a number for each prompt, so that it can be that of some of them."""
    if metric is None or isinstance(metric, (metrics.Metric, RearrangedMetric)):
        return True
    return Experiment(model, clean, [metric], max_memory=max_memory).scores.shape[-1] == len(clean)


def of_prompts(found: Own, rows: Sequence[int]) -> Own:
    """The part of a result that is of some of its prompts; the errors of estimates are those on these prompts."""
    changes: dict[str, Any] = dict.fromkeys(("errors", "floor")) if isinstance(found, Attribution) else {}
    for name in found._tensors():
        if name not in changes:
            changes[name] = getattr(found, name)[..., list(rows)]
    groups = None if found.groups is None else [found.groups[row] for row in rows]
    return replace(found, **changes, groups=groups, fingerprint="")


# ---- what a search sees ----------------------------------------------------------------------------------------------


def searched(known: Sequence[str], held_out: HeldOut, seed: int) -> list[int]:
    """The places of the prompts that a search sees, from the identities of all.

    Prompts with the same identity are seen together, or held out together. Raises ValueError for a share or places that leave
    no prompt to either.
    """
    n, distinct = len(known), list(dict.fromkeys(known))
    if held_out is None:
        held_out = SHARE if len(distinct) >= ENOUGH else 0
    if isinstance(held_out, (int, float)):
        if held_out == 0:
            return list(range(n))
        if not 0 < held_out < 1 or len(distinct) < 2:
            raise ValueError(
                f"held_out is a share from 0 to below 1 of two different pairs at least, or places of pairs; got {held_out} of "
                f"{len(distinct)}"
            )
        order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
        n_held = min(max(round(held_out * len(distinct)), 1), len(distinct) - 1)
        held = {distinct[place] for place in order[:n_held]}
    else:
        held = {known[place] for place in chosen(held_out, n, "held_out") or []}
    if not (seen := [place for place, one in enumerate(known) if one not in held]):
        raise ValueError(f"all {n} pairs are held out: none are left to search")
    return seen


@dataclass(frozen=True)
class MeasuredPairs:
    """What a model reads of pairs of prompts, with their metric."""

    model: Decoder
    corrupted: PromptRows
    clean: PromptRows
    metric: Metric | None

    @classmethod
    def of(
        cls,
        model: Decoder,
        corrupted: Prompts | Pairs,
        clean: Prompts | None,
        metric: Metric | None,
        answers: RightAndWrong | None = None,
    ) -> "MeasuredPairs":
        """The arguments of a function of pairs; raises as `pair_of`."""
        corrupted, clean, metric = unpaired(model, corrupted, clean, metric, answers)
        return cls(model, *pair_of(model, corrupted, clean), metric)

    def some(self, rows: Sequence[int]) -> "MeasuredPairs":
        """Some of the pairs, with the metric of these."""
        metric = None if self.metric is None else RearrangedMetric.of_rows(self.metric, rows, len(self.clean))
        corrupted, clean = (some_rows(self.model, each, rows) for each in (self.corrupted, self.clean))
        return MeasuredPairs(self.model, corrupted, clean, metric)

    def judging(self, circuits: Iterable[Circuit], max_memory: int | str) -> "tuple[MeasuredPairs, str]":
        """The pairs on which circuits are judged, those that no search of them saw if there are some, and what they are in
        words: "" if it is not known of any circuit what its search saw."""
        seen = [circuit.about[SEEN] for circuit in circuits if SEEN in circuit.about]
        if not seen:
            return self, ""
        known = identities(self.model, self.clean)
        unseen = [place for place, one in enumerate(known) if not any(one in some for some in seen)]
        if len(unseen) in (0, len(known)):
            return self, UNSEEN if unseen else SAME
        if not is_per_prompt(self.model, self.metric, self.clean, max_memory):
            return self, PARTLY
        return self.some(unseen), UNSEEN


def searched_pairs(
    model: Decoder, circuit: Circuit, corrupted: Prompts, clean: Prompts, metric: Metric | None
) -> MeasuredPairs:
    """Those of the pairs that the search of a circuit saw."""
    pairs = MeasuredPairs.of(model, corrupted, clean, metric)
    rows = [place for place, one in enumerate(identities(model, pairs.clean)) if one in circuit.about[SEEN]]
    return pairs.some(rows)


def seen_by(found: SweepResult) -> dict[str, Any]:
    """What circuits of measured effects know of the prompts that these were measured on."""
    return {SEEN: found.about[PROMPTS]} if PROMPTS in found.about else {}
