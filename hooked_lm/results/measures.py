"""Measures: scores of which some are shares from 0 to 1, with the intervals of shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hooked_lm.renamed import former_names
from hooked_lm.results.bounds import SHARE, Bounds
from hooked_lm.results.scores import METRIC, Scores


@dataclass(frozen=True, eq=False, repr=False)
class MetricScores(Scores):
    """Metrics for each prompt; `shares` says of each metric whether it is a share from 0 to 1, as accuracies are.

    The intervals of shares are Wilson's (1927), which have a width even if all prompts are right (of all cells at once,
    Hoeffding's); other metrics have those of `Scores`. Without an axis "metric", `shares` has one entry. Raises ValueError for
    another number of entries.

    >>> import torch
    >>> low, high = MetricScores(torch.ones(12), {}, [True]).interval()
    >>> round(float(low), 2), float(high)
    (0.76, 1.0)
    """

    shares: Sequence[bool]
    _BY_METRIC: ClassVar[tuple[str, ...]] = ("shares",)

    def _check(self) -> None:
        object.__setattr__(self, "shares", list(self.shares))
        if len(self.shares) != (n := len(self.axes.get(METRIC, [""]))):
            raise ValueError(f"shares has an entry for each of {n} metrics, got {len(self.shares)}")

    def _known_bounds(self) -> Bounds | None:
        return SHARE if self.shares == [True] else None


if not TYPE_CHECKING:  # type checkers know the present names alone
    __getattr__ = former_names(__name__, Measures="MetricScores")
